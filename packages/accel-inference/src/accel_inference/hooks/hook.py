"""Hooks around the forward of a module."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from accel_inference.module_tensors.ties import (
    find_tied_parameters,
    forget_ties,
    retie_equal_parameters,
    retie_parameters,
)

CASTS = ("float", "double", "half", "bfloat16", "type")
"""Methods that change the dtype of a module's tensors."""
MOVES = ("to", "cpu", "cuda", "npu", "xpu", "mlu", "sdaa", "musa", "hpu", "to_empty", "share_memory", *CASTS)
"""Methods that move or convert a module; a dispatched or offloaded model has its own in their place."""
REPLACED = (*MOVES, "save_pretrained", "load_state_dict")
"""All methods in whose place such a model has its own."""


class ModelHook:
    """What happens around a module's forward; by default nothing.

    ``no_grad`` runs the forward without recording it for autograd. With ``offload`` the module has its weights only
    while it computes.
    """

    no_grad = False
    offload = False

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Called when the hook is added; returns the module, possibly changed."""
        return module

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Called before the forward; returns its arguments, possibly changed."""
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Called after the forward; returns its output, possibly changed."""
        return output

    def failed_forward(self, module: nn.Module) -> None:
        """Called instead of ``post_forward`` after an error, to give back what ``pre_forward`` took."""

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Called when the hook is removed; returns the module, possibly changed."""
        return module


class SequentialHook(ModelHook):
    """Several hooks, in their order."""

    def __init__(self, *hooks: ModelHook) -> None:
        self.hooks = hooks

    @property
    def no_grad(self) -> bool:  # type: ignore[override]
        """Whether one of the hooks wants no record for autograd."""
        return any(hook.no_grad for hook in self.hooks)

    @property
    def offload(self) -> bool:  # type: ignore[override]
        """Whether one of the hooks offloads the weights."""
        return any(hook.offload for hook in self.hooks)

    @property
    def weights_map(self) -> Mapping[str, Tensor] | None:
        """Offloaded weights of the module, which ``save_pretrained`` of transformers reads; None without any."""
        maps = [getattr(hook, "weights_map", None) for hook in self.hooks]
        return next((one for one in maps if one is not None), None)

    def init_hook(self, module: nn.Module) -> nn.Module:
        for hook in self.hooks:
            module = hook.init_hook(module)
        return module

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        for index, hook in enumerate(self.hooks):
            try:
                args, kwargs = hook.pre_forward(module, *args, **kwargs)
            except BaseException:
                for earlier in self.hooks[:index]:
                    earlier.failed_forward(module)
                raise
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        for hook in self.hooks:
            output = hook.post_forward(module, output)
        return output

    def failed_forward(self, module: nn.Module) -> None:
        for hook in self.hooks:
            hook.failed_forward(module)

    def detach_hook(self, module: nn.Module) -> nn.Module:
        for hook in self.hooks:
            module = hook.detach_hook(module)
        return module


def add_hook_to_module(module: nn.Module, hook: ModelHook, append: bool = False) -> nn.Module:
    """Adds a hook to a module, in place; it replaces the present one, or with ``append`` comes after it.

    A hook that is replaced is not detached, unless the module's weights are offloaded by it: they come back.

    The hook is ``module._hf_hook``. ``module.forward`` keeps its name and signature, and is part of the module: a deep
    copy and an unpickled module have their own.
    """
    if append and (present := getattr(module, "_hf_hook", None)) is not None:
        hook = SequentialHook(present, hook)
        remove_hook_from_module(module, detach=False)
    else:
        if getattr(getattr(module, "_hf_hook", None), "offload", False):
            module._hf_hook.detach_hook(module)  # type: ignore[operator, union-attr]
        remove_hook_from_module(module, detach=False)
    added = hook.hooks[-1] if append and isinstance(hook, SequentialHook) else hook
    module = added.init_hook(module)
    original = _picklable_forward(module)
    attributes: Any = module
    attributes._hf_hook, attributes._old_forward = hook, original
    # A partial of a function of a module pickles, and a deep copy of it refers to the copy of the module.
    hooked = functools.update_wrapper(functools.partial(run, module), original)
    _set_forward(module, hooked)
    return module


def _picklable_forward(module: nn.Module) -> Any:
    """The forward of a module; a method that is defined under another name does not pickle, but its function may."""
    forward: Any = module.forward
    function = getattr(forward, "__func__", None)
    if function is None or getattr(type(module), function.__name__, None) is function:
        return forward
    named: Any = functools.partial(function, module)
    named.__name__ = function.__name__
    return named


def run(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The forward of a module between what its hook does before and after."""
    hook: Any = module._hf_hook
    args, kwargs = hook.pre_forward(module, *args, **kwargs)
    forward: Callable[..., Any] = module._old_forward  # type: ignore[assignment]
    try:
        if hook.no_grad:
            with torch.no_grad():
                output = forward(*args, **kwargs)
        else:
            output = forward(*args, **kwargs)
    except BaseException:
        hook.failed_forward(module)
        raise
    return hook.post_forward(module, output)


def remove_hook_from_module(module: nn.Module, recurse: bool = False, *, detach: bool = True) -> nn.Module:
    """Removes the hook of a module, in place; with ``recurse`` those of its submodules, too.

    Offloaded weights come back to where they were before, and those that are tied are one parameter again; those that a
    map had placed on several devices only where they end on one, with equal values.
    """
    ties = find_tied_parameters(module) if recurse and detach else []
    for part in list(module.modules()) if recurse else (module,):
        _remove_hook(part, detach=detach)
    retie_parameters(module, ties)
    if recurse and detach:
        for part in module.modules():
            retie_equal_parameters(part, forget_ties(part))
    return module


def _remove_hook(module: nn.Module, *, detach: bool) -> None:
    if hasattr(module, "_hf_hook"):
        if detach:
            module._hf_hook.detach_hook(module)  # type: ignore[operator, union-attr]
        delattr(module, "_hf_hook")
    if hasattr(module, "_old_forward"):
        _restore_forward(module)
    for name in REPLACED if detach else ():
        module.__dict__.pop(name, None)


def remove_hook_from_submodules(module: nn.Module) -> None:
    """Removes the hooks of a module and of all below it."""
    remove_hook_from_module(module, recurse=True)


def _set_forward(module: nn.Module, forward: Any) -> None:
    if isinstance(module, torch.fx.GraphModule):
        # GraphModule.recompile sets the forward of the class, of which each GraphModule has its own.
        type(module).forward = _for_class(forward)
    else:
        module.__dict__["forward"] = forward


def _for_class(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def hooked(_self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    return hooked


def _restore_forward(module: nn.Module) -> None:
    old: Any = module._old_forward
    if isinstance(module, torch.fx.GraphModule):
        type(module).forward = getattr(old, "__func__", old)
    else:
        module.__dict__.pop("forward", None)
        if module.forward != old and getattr(module.forward, "__func__", None) is not getattr(old, "func", old):
            module.__dict__["forward"] = old
    delattr(module, "_old_forward")

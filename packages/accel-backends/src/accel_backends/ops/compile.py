"""torch.compile of a model or of its repeated blocks, and unwrapping of prepared models."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, cast, final

import torch
from torch import nn

from accel_backends.ops.blocks import repeated_blocks
from accel_backends.ops.fqn import innermost, wrapped_name
from accel_precision.options import KwargsHandler
from accel_state.errors import BackendError, ConfigError, did_you_mean

MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
_WITH_CUDA_GRAPHS = ("reduce-overhead", "max-autotune")


@dataclass(frozen=True, slots=True)
class TorchDynamoPlugin(KwargsHandler):
    """Options of compilation; ``backend="no"`` compiles nothing.

    Attributes:
        backend: backend of torch.compile, in any case ("inductor").
        mode: optimisation goal of inductor; None or "default" leaves it to torch.
        fullgraph: raise at a graph break instead of falling back to Python.
        dynamic: compile for dynamic shapes; None: torch decides by the shapes that occur.
        options: passed to the compiler.
        disable: turn torch.compile into a no-op, for debugging.
        use_regional_compilation: compile the model's repeated blocks once instead of the full model: seconds instead of
            minutes for deep models, at nearly the same speed.
    """

    backend: str = "no"
    mode: str | None = None
    fullgraph: bool = False
    dynamic: bool | None = None
    options: Mapping[str, Any] | None = None
    disable: bool = False
    use_regional_compilation: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "backend", str(getattr(self.backend, "value", self.backend)).lower())
        if self.mode is not None and self.mode not in MODES:
            hint = did_you_mean(self.mode, MODES)
            raise ConfigError(f"mode {self.mode!r} is not one of {', '.join(MODES)}{hint}")
        if self.mode is not None and self.options:
            raise ConfigError(
                f"torch.compile takes a mode or options, not both; got mode={self.mode!r} and {self.options}"
            )

    @property
    def enabled(self) -> bool:
        """Whether anything is compiled."""
        return self.backend != "no"

    @property
    def cuda_graphs(self) -> bool:
        """Whether compiled code runs as CUDA graphs on a CUDA device."""
        return self.enabled and (
            self.mode in _WITH_CUDA_GRAPHS
            or self.backend == "cudagraphs"
            or bool((self.options or {}).get("triton.cudagraphs"))
        )

    def to_kwargs(self) -> dict[str, Any]:
        """Returns the arguments of ``torch.compile`` that differ from its defaults."""
        kwargs = KwargsHandler.to_kwargs(self)
        kwargs.pop("use_regional_compilation", None)
        return kwargs


def compile_model(model: nn.Module, plugin: TorchDynamoPlugin) -> nn.Module:
    """Compiles the model with the plugin's options; returns ``model`` if compilation is off or was done already."""
    if not plugin.enabled or "_orig_mod" in model._modules:
        return model
    if plugin.cuda_graphs:
        GraphSafeGradients(model, marks=plugin.use_regional_compilation)
    if plugin.use_regional_compilation:
        compile_regions(model, plugin)
        return model
    return cast(nn.Module, torch.compile(model, **plugin.to_kwargs()))


@final
class GraphSafeGradients:
    """Hooks of a model that runs as CUDA graphs, whose outputs the next replay of the same graph overwrites.

    A gradient that torch stores in ``grad`` without a copy would be such an output, so a parameter without a gradient
    gets a copy. With ``marks`` a forward of the model begins a new step of torch's graphs, unless an earlier forward
    still awaits its backward: without marks each compiled block outside of training would begin one, and overwrite the
    blocks before it.
    """

    #: Its hooks do not change gradients, so backends that refuse other hooks accept these.
    observes_gradients = True

    def __init__(self, model: nn.Module, *, marks: bool) -> None:
        self._awaits_backward = False
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_hook(partial(self._own, parameter))
        root = innermost(model)
        if marks and repeated_blocks(root):  # a model of one region begins steps by itself
            root.register_forward_pre_hook(self._begin)

    def _own(self, parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        self._awaits_backward = False
        return gradient.clone() if parameter.grad is None else gradient

    def _begin(self, *_: Any) -> None:
        if not self._awaits_backward:
            torch.compiler.cudagraph_mark_step_begin()
        self._awaits_backward = self._awaits_backward or torch.is_grad_enabled()


def refuse_cuda_graphs(plugin: TorchDynamoPlugin, backend: str) -> None:
    """Refuses CUDA graphs of a backend that frees the full parameters and gradients of which graphs have the addresses.

    Raises:
        BackendError: naming the mode, and those that work.
    """
    if plugin.cuda_graphs:
        raise BackendError(
            f"strategy {backend!r} allocates full parameters and gradients anew in each step, and a CUDA graph "
            f"(mode={plugin.mode!r}, backend={plugin.backend!r}, options={plugin.options}) keeps their addresses; "
            "nearest: mode='max-autotune-no-cudagraphs' or 'default', or strategy='ddp'"
        )


def compile_regions(model: nn.Module, plugin: TorchDynamoPlugin) -> list[str]:
    """Compiles the model's repeated blocks in place, without wrappers, and returns their names.

    Blocks of one class share code, so torch compiles the code once. A model without repeated blocks is compiled as one
    module, also in place.
    """
    root = innermost(model)
    names = repeated_blocks(root)
    regions = [root.get_submodule(name) for name in names] or [root]
    for region in regions:
        compile_in_place(region, **plugin.to_kwargs())
    return names or [""]


def compile_in_place(module: nn.Module, **options: Any) -> None:
    """Compiles a module in place, also one of torch.nn's classes, for which ``module.compile`` does nothing.

    ``options`` are those of ``torch.compile``.

    Dynamo skips the frames of torch.nn, so the call of such a module is wrapped in a function of this module, from
    which dynamo starts.
    """
    if not (type(module).forward.__module__ or "").startswith("torch."):
        module.compile(**options)
        return
    call: Callable[..., Any] = module._call_impl

    def run(*args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs)

    module._compiled_call_impl = torch.compile(run, **options)


def unwrap(model: nn.Module, *, keep_torch_compile: bool = True) -> nn.Module:
    """Returns the module inside all wrappers, in a ``torch.compile`` wrapper if ``model`` has one and it is to be kept.

    Idempotent; ``model`` itself is not changed. Blocks that were compiled in place stay compiled.
    """
    inner = innermost(model)
    if not keep_torch_compile:
        return inner
    wrapper = model
    while (name := wrapped_name(wrapper)) is not None:
        below = cast(nn.Module, wrapper._modules[name])
        if name == "_orig_mod":
            if below is inner:
                return wrapper
            kind = cast(Any, type(wrapper))
            return cast(nn.Module, kind(inner, wrapper.dynamo_ctx))
        wrapper = below
    return inner


def unwrap_children(module: nn.Module, *, keep_torch_compile: bool = True) -> None:
    """Puts the user's own modules in the place of wrapped ones inside ``module``, at any depth."""
    for name, child in list(module.named_children()):
        wrapper = wrapped_name(child)
        if wrapper is not None and not (wrapper == "_orig_mod" and keep_torch_compile):
            child = unwrap(child, keep_torch_compile=keep_torch_compile)
            setattr(module, name, child)
        unwrap_children(child, keep_torch_compile=keep_torch_compile)

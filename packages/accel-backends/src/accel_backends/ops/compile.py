"""torch.compile of a model or of its repeated blocks, and unwrapping of prepared models."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, cast

import torch
from torch import nn

from accel_backends.ops.fqn import innermost, wrapped_name
from accel_precision.options import KwargsHandler
from accel_state.errors import ConfigError

MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")


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
            near = get_close_matches(self.mode, MODES, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"mode {self.mode!r} is not one of {', '.join(MODES)}{hint}")
        if self.mode is not None and self.options:
            raise ConfigError(
                f"torch.compile takes a mode or options, not both; got mode={self.mode!r} and {self.options}"
            )

    @property
    def enabled(self) -> bool:
        """Whether anything is compiled."""
        return self.backend != "no"

    def to_kwargs(self) -> dict[str, Any]:
        """Returns the arguments of ``torch.compile`` that differ from its defaults."""
        kwargs = KwargsHandler.to_kwargs(self)
        kwargs.pop("use_regional_compilation", None)
        return kwargs


def compile_model(model: nn.Module, plugin: TorchDynamoPlugin) -> nn.Module:
    """Compiles the model with the plugin's options; returns ``model`` if compilation is off or was done already."""
    if not plugin.enabled or "_orig_mod" in model._modules:
        return model
    if plugin.use_regional_compilation:
        compile_regions(model, plugin)
        return model
    return cast(nn.Module, torch.compile(model, **plugin.to_kwargs()))


def compile_regions(model: nn.Module, plugin: TorchDynamoPlugin) -> list[str]:
    """Compiles the model's repeated blocks in place, without wrappers, and returns their names.

    Blocks of one class share code, so torch compiles the code once. A model without repeated blocks is compiled as one
    module, also in place.
    """
    root = innermost(model)
    names = repeated_blocks(root)
    regions = [root.get_submodule(name) for name in names] or [root]
    for region in regions:
        _compile_in_place(region, plugin)
    return names or [""]


def _compile_in_place(module: nn.Module, plugin: TorchDynamoPlugin) -> None:
    """Compiles a module in place, also one of torch.nn's classes, for which ``module.compile`` does nothing.

    Dynamo skips the frames of torch.nn, so the call of such a module is wrapped in a function of this module, from
    which dynamo starts.
    """
    if not (type(module).forward.__module__ or "").startswith("torch."):
        module.compile(**plugin.to_kwargs())
        return
    call: Callable[..., Any] = module._call_impl

    def run(*args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs)

    module._compiled_call_impl = torch.compile(run, **plugin.to_kwargs())


def repeated_blocks(model: nn.Module) -> list[str]:
    """Returns the names of repeated blocks: elements of an outermost list of two or more modules of one class."""
    found: list[str] = []
    for name, module in model.named_modules():
        if any(name.startswith(f"{block}.") for block in found) or not isinstance(
            module, (nn.ModuleList, nn.Sequential)
        ):
            continue
        kinds = {type(child) for child in module}
        if len(module) > 1 and len(kinds) == 1 and any(True for _ in next(iter(module)).children()):
            found.extend(f"{name}.{position}" if name else str(position) for position in range(len(module)))
    return found


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

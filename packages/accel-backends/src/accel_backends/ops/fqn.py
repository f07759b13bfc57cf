"""Names of parameters in the user's own module, whatever wraps it.

A wrapper is found by what it is, not by the text of a name: a user's own submodule may be called ``module``.
"""

from collections.abc import Iterator
from typing import NamedTuple

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

# Where each kind of wrapper keeps what it wraps: torch.compile, activation checkpointing and offload, FSDP1.
_MARKS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
#: Set on any other module, it says that the module is a wrapper and under which of its names the wrapped one is.
WRAPS = "_accel_wraps"


class ParameterPlace(NamedTuple):
    """A module within a model: its prefix as its author sees it, as torch sees it (both empty or ending in ``.``)."""

    prefix: str
    raw: str
    module: nn.Module


def wrapped_name(module: nn.Module) -> str | None:
    """The attribute under which a wrapper holds what it wraps; None if the module is no wrapper."""
    for mark in _MARKS:
        if mark in module._modules:
            return mark
    announced = module.__dict__.get(WRAPS)
    if announced is not None:
        return str(announced)
    if isinstance(module, (DistributedDataParallel, DataParallel)):
        return "module"
    return None


def innermost(module: nn.Module) -> nn.Module:
    """The user's own module, out of every wrapper around it."""
    while (name := wrapped_name(module)) is not None:
        inner = module._modules[name]
        assert inner is not None
        module = inner
    return module


def places(model: nn.Module) -> Iterator[ParameterPlace]:
    """Every module of a model, in torch's order; a module used in several places is there once for each."""
    yield from _places(model, "", "", ())


def _places(module: nn.Module, prefix: str, raw: str, above: tuple[int, ...]) -> Iterator[ParameterPlace]:
    while (name := wrapped_name(module)) is not None:
        inner = module._modules[name]
        assert inner is not None
        module, raw = inner, f"{raw}{name}."
    yield ParameterPlace(prefix, raw, module)
    for name, child in module._modules.items():
        if child is not None and id(child) not in above:
            yield from _places(child, f"{prefix}{name}.", f"{raw}{name}.", (*above, id(module)))


def named_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The model's parameters by name; one that is used under several names is listed under its first."""
    found: dict[str, nn.Parameter] = {}
    seen: set[int] = set()
    for place in places(model):
        for name, parameter in place.module._parameters.items():
            if parameter is not None and id(parameter) not in seen:
                seen.add(id(parameter))
                found[place.prefix + name] = parameter
    return found


def first_names(model: nn.Module) -> dict[str, str]:
    """For every name of a parameter or buffer, as torch's ``state_dict`` has it, the name that it is stored under.

    Wrappers are left out, and a tensor with several names (tied weights) gets its first.
    """
    stored: dict[str, str] = {}
    first: dict[int, str] = {}
    for place in places(model):
        for name, tensor in (*place.module._parameters.items(), *place.module._buffers.items()):
            if tensor is not None:
                stored[place.raw + name] = first.setdefault(id(tensor), place.prefix + name)
    return stored


def raw_prefixes(model: nn.Module) -> dict[str, str]:
    """For every module's prefix as torch has it, the prefix without wrappers."""
    return {place.raw: place.prefix for place in places(model)}


def natural(name: str) -> list[tuple[int, int, str]]:
    """The key that sorts ``block.10`` after ``block.9``."""
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in name.split(".")]

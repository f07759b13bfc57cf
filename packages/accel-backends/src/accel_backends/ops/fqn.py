"""FQNs: names of parameters in the user's own module, without the prefixes of wrappers.

A wrapper is recognised by its type and submodules, not by the text of a name, because a user's own submodule may be
called ``module``.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, cast

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

if TYPE_CHECKING:
    from torch.distributed.fsdp import FullyShardedDataParallel

# Submodule names of wrappers: torch.compile, activation checkpointing and offload, FSDP1.
_MARKS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
#: Attribute that marks another module as a wrapper; its value is the name of the wrapped submodule.
WRAPS = "_accel_wraps"


class ParameterPlace(NamedTuple):
    """A module within a model, its FQN prefix, and its prefix in torch's ``state_dict`` (empty or ending in ``.``)."""

    prefix: str
    raw: str
    module: nn.Module


def wrapped_name(module: nn.Module) -> str | None:
    """Returns the name of a wrapper's wrapped submodule; None if the module is no wrapper."""
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
    """Returns the user's own module, without the wrappers around it."""
    while (name := wrapped_name(module)) is not None:
        inner = module._modules[name]
        assert inner is not None
        module = inner
    return module


def find_fsdp1(model: nn.Module) -> "FullyShardedDataParallel | None":
    """Returns the outermost FSDP1 wrapper around a model; None without one."""
    while "_fsdp_wrapped_module" not in model._modules:
        name = wrapped_name(model)
        if name is None:
            return None
        model = cast(nn.Module, model._modules[name])
    return cast("FullyShardedDataParallel", model)


def places(model: nn.Module) -> Iterator[ParameterPlace]:
    """Yields every module of a model, in torch's order; a module that is used in several places once for each place."""
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
    """Returns the model's parameters by FQN; tied parameters are listed under their first name only."""
    found: dict[str, nn.Parameter] = {}
    seen: set[int] = set()
    for place in places(model):
        for name, parameter in place.module._parameters.items():
            if parameter is not None and id(parameter) not in seen:
                seen.add(id(parameter))
                found[place.prefix + name] = parameter
    return found


def first_names(model: nn.Module) -> dict[str, str]:
    """Maps every name of a parameter or buffer in torch's ``state_dict`` to its FQN.

    A tensor with several names (tied weights) has its first FQN.
    """
    stored: dict[str, str] = {}
    first: dict[int, str] = {}
    for place in places(model):
        for name, tensor in (*place.module._parameters.items(), *place.module._buffers.items()):
            if tensor is not None:
                stored[place.raw + name] = first.setdefault(id(tensor), place.prefix + name)
    return stored


def raw_prefixes(model: nn.Module) -> dict[str, str]:
    """Maps every module's prefix in torch's ``state_dict`` to its FQN prefix."""
    return {place.raw: place.prefix for place in places(model)}


def natural(name: str) -> list[tuple[int, int, str]]:
    """Returns the sort key of a name in natural order: ``block.10`` after ``block.9``."""
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in name.split(".")]


def sparse_embeddings(model: nn.Module) -> Iterator[tuple[str, nn.Embedding | nn.EmbeddingBag]]:
    """Yields, with their names, the embeddings built with ``sparse=True``: their gradients cannot be sharded."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            yield name, module


def few(names: Sequence[str], most: int = 5) -> str:
    """Returns the first ``most`` names as text, and the number of further ones."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")

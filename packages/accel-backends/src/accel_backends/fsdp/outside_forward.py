"""Errors for uses of a sharded model outside of its forward: modules called alone, and backwards that come too late."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from accel_backends.ops.dtensor import is_dtensor
from accel_backends.ops.fqn import places
from accel_state.errors import BackendError

_REGISTER = "torch.distributed.fsdp.register_fsdp_forward_method(accelerator.unwrap_model(model), 'name')"
# Parts of torch's messages: a view of a parameter whose storage was freed; flat gradients left from a micro-batch.
_FREED = "out of bounds for storage of size 0"
_LEFT = "_saved_grad_shard"


class Own(NamedTuple):
    """A module that is all-gathered with the root, its name, and a parameter that shows whether it is gathered."""

    module: nn.Module
    name: str
    parameter: str


def outside_units(model: nn.Module, units: Iterable[nn.Module]) -> list[Own]:
    """Returns the modules with DTensor parameters of their own that belong to the root and to no unit."""
    seen = {id(model), *(id(module) for unit in units for module in unit.modules())}
    found = []
    for place in places(model):
        if id(place.module) in seen:
            continue
        seen.add(id(place.module))
        named = (name for name, parameter in place.module._parameters.items() if is_dtensor(parameter))
        if (parameter := next(named, None)) is not None:
            found.append(Own(place.module, place.prefix.removesuffix("."), parameter))
    return found


def refuse_outside(modules: Iterable[Own], kind: str, version: int) -> list[RemovableHandle]:
    """Makes these modules of a model of class ``kind`` raise BackendError if they are called outside of its forward.

    Otherwise torch raises an error about the type or shape of a tensor. ``version`` is the FSDP version: shards are
    DTensors in version 2, and flat slices in version 1, where the original has several dimensions. Returns the hooks,
    which have to be removed before torch.compile, because dynamo compiles a module with a hook as a separate graph.
    """
    nearest = "strategy='ddp'"
    if version == 2:
        nearest = f"after prepare {_REGISTER}, for a method that forward does not call"
    handles = []
    for module, name, parameter in modules:
        said = (
            f"{name} of {kind} was called outside of {kind}.forward, and its parameters are gathered only there; call "
            f"the prepared model, whose forward may call its other methods; or {nearest}"
        )
        is_shard = _has_axes_of(module._parameters[parameter]) if version == 2 else _is_flat
        handles.append(module.register_forward_pre_hook(_refusing(parameter, is_shard, said)))
    return handles


def _refusing(name: str, is_shard: Callable[[Any], bool], said: str) -> Callable[[nn.Module, Any], None]:
    def refuse(module: nn.Module, inputs: Any) -> None:
        if is_shard(module._parameters.get(name)):
            raise BackendError(said)

    return refuse


def _has_axes_of(shard: Any) -> Callable[[Any], bool]:
    """Whether a parameter is a DTensor over as many axes as ``shard``; gathered, it keeps its tensor-parallel axis."""
    axes = shard.device_mesh.ndim

    def is_shard(parameter: Any) -> bool:
        return is_dtensor(parameter) and parameter.device_mesh.ndim == axes

    return is_shard


def _is_flat(parameter: torch.Tensor | None) -> bool:
    return parameter is not None and parameter.dim() == 1


@contextmanager
def explained(version: int) -> Iterator[None]:
    """Context that turns torch's errors about freed parameters and left gradients into BackendErrors with the cause.

    ``version`` is the FSDP version, 1 or 2.
    """
    try:
        yield
    except (RuntimeError, AssertionError) as error:
        said = str(error)
        if _FREED in said:
            raise BackendError(
                f"this backward needs parameters that fsdp_version={version} has given back to other ranks: they are "
                "gathered for one backward after each forward. Add the losses of one forward up and call backward once "
                "in place of backward(retain_graph=True); call backward before the next forward, also with no_sync and "
                "trigger_sync_in_backward; for gradients of gradients (create_graph=True) use strategy='ddp'"
            ) from error
        if _LEFT in said:
            raise BackendError(
                "a part of the model was used in some micro-batches of a window and not in others, and fsdp_version=1 "
                "cannot add such gradients up; nearest: fsdp_version=2, or strategy='ddp', with or without "
                "find_unused_parameters"
            ) from error
        raise

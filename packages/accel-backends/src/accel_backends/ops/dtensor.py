"""Tensor subclasses among parameters: DTensors, their conversion to and from full tensors, and quantized weights."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.optim import Optimizer

from accel_backends.ops.fqn import places
from accel_backends.ops.state_dicts import STATE
from accel_backends.private import shard_of
from accel_state.pytree.composite import is_composite
from accel_state.watchdog.decorator import recorded

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_dtensor(tensor: object) -> bool:
    """Whether ``tensor`` is a DTensor; does not import ``torch.distributed.tensor``."""
    return isinstance(tensor, torch.Tensor) and type(tensor) is not torch.Tensor and hasattr(tensor, "device_mesh")


def is_quantized(parameter: nn.Parameter) -> bool:
    """Whether a parameter is a frozen quantized weight of torchao or bitsandbytes, which no broadcast may send.

    A broadcast flattens each tensor, which those of torchao do not permit, because they consist of several tensors; and
    it would send the integers of bitsandbytes without their scales. Every rank has loaded the same.
    """
    return (
        not parameter.requires_grad
        and type(parameter) is not nn.Parameter
        and not is_dtensor(parameter)
        and (is_composite(parameter) or not parameter.is_floating_point())
    )


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Returns this rank's shard of a DTensor, which shares its memory; other tensors are returned unchanged."""
    local: torch.Tensor | None = shard_of(tensor)
    return tensor if local is None else local


def loop_over_meshes(optimizer: Optimizer) -> None:
    """Makes an optimizer with parameters of several meshes step in a loop: foreach and fused steps take one mesh."""
    for group in optimizer.param_groups:
        meshes = {parameter.device_mesh if is_dtensor(parameter) else None for parameter in group["params"]}
        for loop in ("foreach", "fused") if len(meshes) > 1 else ():
            if loop in group:
                group[loop] = False


def gathered(tensor: torch.Tensor) -> torch.Tensor:
    """All-gathers a DTensor to a full tensor on every rank; other tensors are returned unchanged.

    A shard in host memory (offload) is copied to its mesh's device first.

    Collective: every rank of the group must call this.
    """
    if not is_dtensor(tensor):
        return tensor
    from torch.distributed.tensor import DTensor

    sharded = cast("DTensor", tensor.detach())
    local = sharded.to_local()
    if local.device.type != sharded.device_mesh.device_type:
        sharded = DTensor.from_local(
            local.to(sharded.device_mesh.device_type),
            sharded.device_mesh,
            sharded.placements,
            run_check=False,
            shape=sharded.shape,
            stride=sharded.stride(),
        )
    full: torch.Tensor = sharded.full_tensor()
    return full


def sharded_like(full: torch.Tensor, model: torch.Tensor) -> torch.Tensor:
    """Shards the full tensor ``full``, which every rank has, like ``model``; without communication.

    The dtype is kept. Returns ``full`` unchanged if ``model`` is no DTensor, ``full`` is one, or the shapes differ.
    """
    if not is_dtensor(model) or is_dtensor(full) or full.shape != model.shape:
        return full
    from torch.distributed.tensor import DTensor, distribute_tensor

    like = cast("DTensor", model)
    device = like.to_local().device
    if device.type == like.device_mesh.device_type:
        return distribute_tensor(full.to(device), like.device_mesh, like.placements, src_data_rank=None)
    # Sharded on the mesh's own device and then copied to the host, one tensor at a time.
    placed = distribute_tensor(
        full.to(like.device_mesh.device_type), like.device_mesh, like.placements, src_data_rank=None
    )
    return DTensor.from_local(
        placed.to_local().to(device),
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )


def placed_like(value: Any, model: Any) -> Any:
    """Applies ``sharded_like`` to a state value; returns ``value`` unchanged if it or ``model`` is no tensor."""
    both = isinstance(value, torch.Tensor) and isinstance(model, torch.Tensor)
    return sharded_like(value, model) if both else value


def over_axes(value: Any, mesh: Any) -> Any:
    """The same DTensor over all axes of ``mesh``, a replica along those that its own mesh does not have.

    Shares its memory. Other values, and DTensors with axes that ``mesh`` lacks, are returned unchanged.
    """
    names = (value.device_mesh.mesh_dim_names or ()) if is_dtensor(value) else ()
    if len(names) in (0, mesh.ndim) or not set(names) <= set(mesh.mesh_dim_names):
        return value
    from torch.distributed.tensor import DTensor, Replicate

    known = dict(zip(names, value.placements, strict=True))
    return DTensor.from_local(
        value.detach().to_local(),
        mesh,
        [known.get(name, Replicate()) for name in mesh.mesh_dim_names],
        run_check=False,
        shape=value.shape,
        stride=value.stride(),
    )


def placed_over_axes(value: Any, model: Any) -> Any:
    """A value as the shard of ``model``: a full tensor, or a DTensor that has the same shard over more axes."""
    if not (is_dtensor(value) and is_dtensor(model)):
        return placed_like(value, model)
    if value.device_mesh == model.device_mesh:
        return value
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        value.to_local(),
        model.device_mesh,
        model.placements,
        run_check=False,
        shape=model.shape,
        stride=model.stride(),
    )


@recorded("get_state_dict")
def full_state(state: Mapping[str, Any], *, keep: bool = True, host: bool = True) -> dict[str, Any]:
    """Returns a model's state dict with full tensors. Collective: every rank of the group must call this.

    Tensors are all-gathered one by one, so that with ``host`` (copies in host memory) the device holds one full tensor
    at a time. Without ``keep`` this rank only takes part in the all-gathers, and the result is empty.
    """
    found: dict[str, Any] = {}
    for name, value in state.items():
        full = gathered(value) if isinstance(value, torch.Tensor) else value
        if keep:
            found[name] = full
            if isinstance(full, torch.Tensor):
                found[name] = full.detach().cpu() if host else full.detach()
    return found


@recorded("full optimizer state")
def full_optimizer_state(state: Mapping[str, Any], *, keep: bool = True, host: bool = True) -> dict[str, Any]:
    """Returns an optimizer's state dict by FQN (see ``state_dicts``) with full tensors; otherwise as ``full_state``."""
    values = {name: full_state(entries, keep=keep, host=host) for name, entries in state[STATE].items()}
    return {**state, STATE: values} if keep else {}


@contextmanager
def full_parameters(model: nn.Module, *, writeback: bool = True) -> Iterator[None]:
    """Context in which the model's parameters are full tensors, in their own dtype, on every rank.

    On exit each rank copies its shard of the changed parameters back, unless ``writeback`` is off; every rank has to
    make the same changes. The full parameters are for reading and editing only: the model's forward all-gathers for
    itself. Entry and exit are collectives.

    Collective: every rank of the group must call this.
    """
    sharded: dict[int, nn.Parameter] = {}
    full: dict[int, nn.Parameter] = {}
    swapped: list[tuple[nn.Module, str, int]] = []
    for place in list(places(model)):
        for name, parameter in place.module._parameters.items():
            if parameter is None or not is_dtensor(parameter):
                continue
            key = id(parameter)
            if key not in full:
                sharded[key] = parameter
                value = gathered(parameter)
                full[key] = nn.Parameter(value.clone() if _shares(value, parameter) else value, parameter.requires_grad)
            swapped.append((place.module, name, key))
    for module, name, key in swapped:
        module._parameters[name] = full[key]
    try:
        yield
    finally:
        for module, name, key in swapped:
            module._parameters[name] = sharded[key]
        if writeback:
            with torch.no_grad():
                for key, parameter in sharded.items():
                    parameter.copy_(sharded_like(full[key].detach(), parameter))


def _shares(full: torch.Tensor, parameter: Any) -> bool:
    return bool(full.data_ptr() == parameter.detach().to_local().data_ptr())

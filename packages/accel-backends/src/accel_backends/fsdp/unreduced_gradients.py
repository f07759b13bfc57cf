"""Unreduced gradients of an FSDP2 model within an accumulation window."""

from collections.abc import Container, Iterator, Mapping
from typing import Any, cast

import torch
from torch import nn

from accel_backends.ops.averaging import averaged, brought_by_any
from accel_backends.ops.dtensor import gathered, is_dtensor, sharded_like
from accel_backends.ops.fqn import innermost, named_parameters
from accel_backends.private import full_parameter, unit_parameters


def unreduced_gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """Returns this rank's unreduced gradients as full tensors, by FQN, reduced parts of the window included.

    torch keeps unreduced gradients in private attributes.

    Collective: every rank of the group must call this.
    """
    unreduced = {id(entry.sharded_param): added for entry, added in _unreduced(model)}
    found: dict[str, torch.Tensor] = {}
    for name, parameter in named_parameters(model).items():
        parts = [] if parameter.grad is None else [gathered(parameter.grad)]
        if id(parameter) in unreduced:
            added = gathered(unreduced[id(parameter)])
            parts.append(added.to(parts[0].device) if parts else added)
        if parts:
            found[name] = parts[0] if len(parts) == 1 else parts[0] + parts[1]
    return found


def set_unreduced_gradients(model: nn.Module, gradients: Mapping[str, torch.Tensor], *, group: Any = None) -> None:
    """Sets every parameter's gradient to this rank's shard of the mean over ranks of the given gradients.

    Ranks may have different names; a missing gradient counts as zero. Unsharded parameters keep this rank's gradient,
    which a later backward averages.

    Collective: every rank of the group must call this.
    """
    brought = brought_by_any(gradients, group)
    drop_gradients(model)
    for name, parameter in named_parameters(model).items():
        mine = gradients.get(name)
        if name not in brought:
            continue
        if not is_dtensor(parameter):
            parameter.grad = None if mine is None else mine.to(parameter.device, parameter.dtype)
        else:
            empty = torch.zeros(
                parameter.shape, dtype=parameter.dtype, device=cast(Any, parameter).device_mesh.device_type
            )
            parameter.grad = sharded_like(averaged(mine, empty, group), parameter)


def drop_gradients(model: nn.Module) -> None:
    """Drops all gradients, those that torch has not reduced yet included."""
    drop_unreduced(model)
    for parameter in model.parameters():
        parameter.grad = None


def drop_unreduced(model: nn.Module, parameters: Container[int] | None = None) -> None:
    """Drops the unreduced full gradients of sharded parameters; ``parameters``: ids of those; None: of all."""
    for entry, _ in _unreduced(model):
        if parameters is None or id(entry.sharded_param) in parameters:
            _drop(entry)


def scale_unreduced(model: nn.Module, factor: float | torch.Tensor) -> None:
    """Multiplies the unreduced full gradients by a number, or by a tensor with one."""
    for _, added in _unreduced(model):
        added.mul_(factor if not isinstance(factor, torch.Tensor) else factor.to(added.device, added.dtype))


def added_up(entry: Any) -> torch.Tensor | None:
    """Returns the full unreduced gradient of a parameter on this rank, given torch's ``FSDPParam``."""
    added: torch.Tensor | None = entry.unsharded_accumulated_grad
    if added is None:
        full = full_parameter(entry)
        added = None if full is None else full.grad
    return added


def _drop(entry: Any) -> None:
    if (full := full_parameter(entry)) is not None:
        full.grad = None
    if entry.unsharded_accumulated_grad is not None:  # in torch 2.15 this is that very gradient, and cannot be set
        entry.unsharded_accumulated_grad = None


def _unreduced(model: nn.Module) -> Iterator[tuple[Any, torch.Tensor]]:
    """Yields torch's ``FSDPParam`` of parameters with unreduced full gradients, and the gradients."""
    for module in innermost(model).modules():
        for entry in unit_parameters(module):
            if (added := added_up(entry)) is not None:
                yield entry, added

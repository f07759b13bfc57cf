"""Gradients of a model sharded by version 2 in an accumulation window that is still open."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, cast

import torch
from torch import nn

from accel_backends.ops.dtensor import gathered, is_dtensor, sharded_like
from accel_backends.ops.fqn import innermost, named_parameters
from accel_state.collectives.objects import all_gather_object


def unreduced_gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """This rank's share of each parameter's gradient, whole, under the parameter's name; collective.

    torch keeps what was not reduced beside the parameters, where no public name reaches it.
    """
    unreduced = {id(entry.sharded_param): added for entry, added in _unreduced(model)}
    found: dict[str, torch.Tensor] = {}
    for name, parameter in named_parameters(model).items():
        parts = [] if parameter.grad is None else [gathered(parameter.grad)]
        if id(parameter) in unreduced:
            parts.append(unreduced[id(parameter)].to(parts[0].device) if parts else unreduced[id(parameter)])
        if parts:
            found[name] = parts[0] if len(parts) == 1 else parts[0] + parts[1]
    return found


def set_unreduced_gradients(model: nn.Module, gradients: Mapping[str, torch.Tensor], *, group: Any = None) -> None:
    """Gives every parameter its part of the average over ranks of these shares; collective.

    Ranks may have different names; a gradient that a rank lacks counts as zero there. Parameters that are whole keep
    their rank's share, which backward averages later.
    """
    brought = brought_by_any(gradients, group)
    for entry, _ in _unreduced(model):
        entry.unsharded_accumulated_grad = None
        if (whole := getattr(entry, "_unsharded_param", None)) is not None:
            whole.grad = None
    for name, parameter in named_parameters(model).items():
        mine = gradients.get(name)
        if name not in brought:
            parameter.grad = None
        elif not is_dtensor(parameter):
            parameter.grad = None if mine is None else mine.to(parameter.device, parameter.dtype)
        else:
            empty = torch.zeros(
                parameter.shape, dtype=parameter.dtype, device=cast(Any, parameter).device_mesh.device_type
            )
            parameter.grad = sharded_like(averaged(mine, empty, group), parameter)


def brought_by_any(gradients: Mapping[str, torch.Tensor], group: Any = None) -> set[str]:
    """The names that some rank has; collective."""
    return {name for names in all_gather_object(sorted(gradients), group=group) for name in names}


def averaged(mine: torch.Tensor | None, total: torch.Tensor, group: Any = None) -> torch.Tensor:
    """The average over ranks of what each has, nothing counting as zero, in ``total``, which is zero; collective."""
    import torch.distributed as dist

    if mine is not None:
        total.copy_(mine)
    if (ranks := dist.get_world_size(group)) > 1:
        dist.all_reduce(total, group=group)
    return total.div_(ranks)


def parameter_groups(state: Any) -> Iterable[Any]:
    """torch's groups of a unit's parameters; before torch 2.13 a unit has one, or none."""
    groups: Iterable[Any] | None = getattr(state, "_fsdp_param_groups", None)
    if groups is not None:
        return groups
    return () if state._fsdp_param_group is None else (state._fsdp_param_group,)


def added_up(entry: Any) -> torch.Tensor | None:
    """The full gradient that adds up on this rank for a parameter, given as torch's entry of it."""
    added: torch.Tensor | None = entry.unsharded_accumulated_grad
    if added is None:
        whole = getattr(entry, "_unsharded_param", None)
        added = None if whole is None else whole.grad
    return added


def _unreduced(model: nn.Module) -> Iterator[tuple[Any, torch.Tensor]]:
    """torch's entries of the parameters whose gradients add up whole on this rank, with what has added up."""
    for module in innermost(model).modules():
        state = getattr(module, "_get_fsdp_state", None)
        for group in () if state is None else parameter_groups(state()):
            for entry in group.fsdp_params:
                if (added := added_up(entry)) is not None:
                    yield entry, added

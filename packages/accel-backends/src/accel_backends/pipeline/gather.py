"""Tensors that are on different ranks of a pipeline, on all ranks."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from accel_backends.ops.dtensor import gathered
from accel_state.collectives.objects import all_gather_object
from accel_state.watchdog.decorator import recorded


@recorded("gather of pipeline stages")
def gather_stages(
    own: Mapping[Any, Any], group: dist.ProcessGroup, device: torch.device, *, keep: bool = True, host: bool = False
) -> dict[Any, Any]:
    """Returns the entries of all ranks; of entries with one name, those of the first rank.

    Tensors are sent one at a time; sharded ones as full tensors, which all ranks with the same stage gather. ``host``:
    copied to host memory. Without ``keep`` this rank only takes part, and the result is empty.

    Collective: every rank of the group must call this.
    """
    facts = {
        name: (tuple(value.shape), value.dtype) if isinstance(value, torch.Tensor) else (None, value)
        for name, value in own.items()
    }
    found: dict[Any, Any] = {}
    seen: set[Any] = set()
    here = dist.get_rank(group)
    for source, known in enumerate(all_gather_object(facts, group=group)):
        for name, (shape, kind) in known.items():
            if name in seen:
                continue
            seen.add(name)
            value = kind
            if shape is not None:
                value = _sent(own[name] if source == here else None, shape, kind, source, group=group, device=device)
                value = value.cpu() if host else value
            if keep:
                found[name] = value
    return found


def _sent(
    own: torch.Tensor | None,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    source: int,
    *,
    group: dist.ProcessGroup,
    device: torch.device,
) -> torch.Tensor:
    """Sends the tensor of the rank ``source`` to all, each of which gets it on the device; the source keeps its own."""
    full = None if own is None else gathered(own).detach()
    tensor = torch.empty(shape, dtype=dtype, device=device) if full is None else full.to(device).contiguous()
    dist.broadcast(tensor, group=group, group_src=source)
    return tensor if full is None else full


@recorded("gradients of pipeline stages")
def mean_over_ranks(
    own: Mapping[str, torch.Tensor], group: dist.ProcessGroup | None, device: torch.device
) -> dict[str, torch.Tensor]:
    """Returns the mean over ranks of each tensor that one of them has; others count as zero.

    Collective: every rank of the group must call this.
    """
    facts = {name: (tuple(value.shape), value.dtype) for name, value in own.items()}
    known: dict[str, Any] = {}
    for there in all_gather_object(facts, group=group):
        known |= there
    found = {}
    for name, (shape, dtype) in sorted(known.items()):
        value = own[name].to(device, copy=True) if name in own else torch.zeros(shape, dtype=dtype, device=device)
        dist.all_reduce(value, group=group)
        found[name] = value / dist.get_world_size(group)
    return found

"""Full weights and optimizer states of parameters, read from and written to the partitions of an engine."""

import torch
from torch import nn

from accel_deepspeed.tensor_parallel.shards import full_of_shard, local_shape_of, shard_of_full
from accel_deepspeed.zero.partitions import Partition, Partitions


def full_of(parts: Partitions, parameter: nn.Parameter, key: str | None = None) -> torch.Tensor:
    """Returns a parameter's weight in the optimizer's dtype, or one of its optimizer states, in full on every rank.

    Collective: every rank of the group must call this.
    """
    import torch.distributed as dist

    shape = local_shape_of(parameter)
    with parts.held(parameter) as part:
        dtype = _dtype_elsewhere(parts, key) if part.flat is None else _source(parts, part, key).dtype
        whole = torch.zeros(shape.numel(), dtype=dtype, device=parts.engine.device)
        if part.size and part.flat is not None:
            whole.narrow(0, part.start, part.size).copy_(part.of(_source(parts, part, key)))
    if dist.get_world_size(parts.group(parameter)) > 1 and shape.numel() and parts.spread:
        dist.all_reduce(whole, group=parts.group(parameter))
    return full_of_shard(parameter, whole.view(shape))


def put_full(parts: Partitions, parameter: nn.Parameter, value: torch.Tensor, key: str | None = None) -> None:
    """Writes this rank's shard of a full weight or state."""
    put_part(parts, parameter, shard_of_full(parameter, value), key)


def put_part(parts: Partitions, parameter: nn.Parameter, value: torch.Tensor, key: str | None = None) -> None:
    """Writes this rank's shard of a weight or state; ``value`` is the tensor-parallel shard (full without AutoTP)."""
    with parts.held(parameter, changed=True) as part:
        if part.size and part.flat is not None:
            target = part.of(_source(parts, part, key))
            target.copy_(value.reshape(-1).narrow(0, part.start, part.size))


def _dtype_elsewhere(parts: Partitions, key: str | None) -> torch.dtype:
    """Returns the dtype of a weight or state that only other ranks have, which is the dtype of this rank's own ones."""
    flats = parts.flats()
    found = flats if key is None else [parts.state[flat][key] for flat in flats if key in parts.state.get(flat, ())]
    return found[0].dtype if found else torch.float32


def _source(parts: Partitions, part: Partition, key: str | None) -> torch.Tensor:
    assert part.flat is not None
    if key is None:
        return part.flat
    found: torch.Tensor = parts.state[part.flat][key]
    return found

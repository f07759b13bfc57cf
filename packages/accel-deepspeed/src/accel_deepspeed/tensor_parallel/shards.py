"""Tensor-parallel shards of parameters, and full parameters assembled from them."""

import torch

from accel_deepspeed.tensor_parallel.partition_map import PartMap

# Attribute in which DeepSpeed records how AutoTP has split a parameter.
NOTE = "ds_autotp_universal_checkpoint_meta"


def is_cut(parameter: torch.Tensor) -> bool:
    """Whether a parameter is sharded over the tensor-parallel group."""
    note = getattr(parameter, NOTE, None)
    return note is not None and not note["replicated"]


def map_of(parameter: torch.Tensor) -> PartMap | None:
    """Returns the partition map of a parameter; None if it is replicated in the tensor-parallel group."""
    return PartMap.of(getattr(parameter, NOTE)["conversion"]["affine_map"]) if is_cut(parameter) else None


def shape_of(parameter: torch.Tensor) -> torch.Size:
    """Returns the full shape of a parameter."""
    cut = map_of(parameter)
    return local_shape_of(parameter) if cut is None else cut.shape


def local_shape_of(parameter: torch.Tensor) -> torch.Size:
    """Returns the shape of this rank's tensor-parallel shard, also if ZeRO has partitioned the parameter."""
    shape: torch.Size = getattr(parameter, "ds_shape", parameter.shape)
    return shape


def full_of_shard(parameter: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """Returns a full value or state of a parameter from this rank's tensor-parallel shard.

    Collective if it is sharded: every rank of the group must call this.
    """
    cut = map_of(parameter)
    if cut is None:
        return part
    import torch.distributed as dist
    from deepspeed.utils import groups

    group = groups.get_tensor_model_parallel_group()
    full = torch.zeros(cut.shape.numel(), dtype=part.dtype, device=part.device)
    cut.put(full, part, group.rank())
    dist.all_reduce(full, group=group)
    return full.view(cut.shape)


def shard_of_full(parameter: torch.Tensor, full: torch.Tensor) -> torch.Tensor:
    """Returns this rank's tensor-parallel shard of a full value or state of a parameter, as a flat tensor."""
    cut = map_of(parameter)
    if cut is None:
        return full.reshape(-1)
    from deepspeed.utils import groups

    return cut.take(full, groups.get_tensor_model_parallel_rank())

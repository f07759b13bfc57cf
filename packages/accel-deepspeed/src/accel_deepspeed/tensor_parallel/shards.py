"""Tensor-parallel shards of parameters, and full parameters assembled from them."""

from dataclasses import dataclass
from typing import Any, final

import torch

from accel_deepspeed.tensor_parallel.partition_map import PartMap

# Attribute in which DeepSpeed records how AutoTP has split a parameter.
NOTE = "ds_autotp_universal_checkpoint_meta"


@final
@dataclass(frozen=True, slots=True)
class TensorParallelShard:
    """Sharding of one parameter over a tensor-parallel group.

    Attributes:
        map: blocks of the full parameter on each rank.
        group: the tensor-parallel group.
    """

    map: PartMap
    group: Any

    def full(self, part: torch.Tensor) -> torch.Tensor:
        """Assembles the full parameter on every rank of the group from all shards.

        Collective: every rank of the group must call this.
        """
        import torch.distributed as dist

        found = torch.zeros(self.map.shape.numel(), dtype=part.dtype, device=part.device)
        self.map.put(found, part, self.group.rank())
        dist.all_reduce(found, group=self.group)
        return found.view(self.map.shape)

    def part(self, full: torch.Tensor) -> torch.Tensor:
        """Returns this rank's shard of a full parameter, as a flat tensor."""
        return self.map.take(full, self.group.rank())


def is_cut(parameter: torch.Tensor) -> bool:
    """Whether a parameter is sharded over the tensor-parallel group."""
    note = getattr(parameter, NOTE, None)
    return note is not None and not note["replicated"]


def cut_of(parameter: torch.Tensor) -> TensorParallelShard | None:
    """Returns the tensor-parallel sharding of a parameter; None if it is replicated in the group."""
    if not is_cut(parameter):
        return None
    from deepspeed.utils import groups

    described = PartMap.of(getattr(parameter, NOTE)["conversion"]["affine_map"])
    return TensorParallelShard(described, groups.get_tensor_model_parallel_group())


def shape_of(parameter: torch.Tensor) -> torch.Size:
    """Returns the full shape of a parameter."""
    cut = cut_of(parameter)
    return local_shape_of(parameter) if cut is None else cut.map.shape


def local_shape_of(parameter: torch.Tensor) -> torch.Size:
    """Returns the shape of this rank's tensor-parallel shard, also if ZeRO has partitioned the parameter."""
    shape: torch.Size = getattr(parameter, "ds_shape", parameter.shape)
    return shape


def full_of_shard(parameter: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """Returns a full value or state of a parameter from this rank's tensor-parallel shard.

    A collective if it is sharded.

    Collective: every rank of the group must call this.
    """
    cut = cut_of(parameter)
    return part if cut is None else cut.full(part)


def shard_of_full(parameter: torch.Tensor, full: torch.Tensor) -> torch.Tensor:
    """Returns this rank's tensor-parallel shard of a full value or state of a parameter, as a flat tensor."""
    cut = cut_of(parameter)
    return full.reshape(-1) if cut is None else cut.part(full)

"""A rank's blocks of each parameter where ranks share layers, and full parameters made of them."""

from dataclasses import dataclass
from typing import Any, final

import torch

from accel_deepspeed.tensor_parallel.partition_map import PartMap

# Where DeepSpeed notes how AutoTP has cut a parameter.
NOTE = "ds_autotp_universal_checkpoint_meta"


@final
@dataclass(frozen=True, slots=True)
class TensorParallelShard:
    """One parameter of which each rank of a group has other rows, columns or blocks.

    Attributes:
        map: which blocks of the whole each rank has.
        group: the ranks that share layers.
    """

    map: PartMap
    group: Any

    def whole(self, part: torch.Tensor) -> torch.Tensor:
        """The whole of which every rank has a part, on every rank; collective over the group."""
        import torch.distributed as dist

        found = torch.zeros(self.map.shape.numel(), dtype=part.dtype, device=part.device)
        self.map.put(found, part, self.group.rank())
        dist.all_reduce(found, group=self.group)
        return found.view(self.map.shape)

    def part(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of a whole that every rank has, flat."""
        return self.map.take(whole, self.group.rank())


def is_cut(parameter: torch.Tensor) -> bool:
    """Whether each rank of those that share layers has another part of a parameter."""
    note = getattr(parameter, NOTE, None)
    return note is not None and not note["replicated"]


def cut_of(parameter: torch.Tensor) -> TensorParallelShard | None:
    """How a parameter is cut; None: every rank has all that ZeRO does not spread."""
    if not is_cut(parameter):
        return None
    from deepspeed.utils import groups

    described = PartMap.of(getattr(parameter, NOTE)["conversion"]["affine_map"])
    return TensorParallelShard(described, groups.get_tensor_model_parallel_group())


def shape_of(parameter: torch.Tensor) -> torch.Size:
    """The shape of a parameter, also where only a part of it is here."""
    cut = cut_of(parameter)
    return local_shape_of(parameter) if cut is None else cut.map.shape


def local_shape_of(parameter: torch.Tensor) -> torch.Size:
    """The shape of what this rank computes with, also where ZeRO has spread it."""
    shape: torch.Size = getattr(parameter, "ds_shape", parameter.shape)
    return shape


def full_of_shard(parameter: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """A value of a parameter, or a state of it, whole on every rank, from this rank's part; collective if it is cut."""
    cut = cut_of(parameter)
    return part if cut is None else cut.whole(part)


def shard_of_full(parameter: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """This rank's part of a full value of a parameter, or of a state of it, flat."""
    cut = cut_of(parameter)
    return whole.reshape(-1) if cut is None else cut.part(whole)

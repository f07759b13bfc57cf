"""Parallel layout of models and samples under Megatron-LM."""

from collections.abc import Mapping
from typing import final

from accel_backends import ReplicatedLayout


@final
class MegatronLayout(ReplicatedLayout):
    """Layers split over tensor-parallel ranks, stages over pipeline ranks, sequences over context-parallel ranks.

    Samples are split over the other ranks.
    """

    @property
    def degrees(self) -> tuple[int, int]:
        """Replicas, one per data-parallel rank, and shard degree: parameters are split by layers."""
        return self.run.parallelism.data_parallel_size, 1

    @property
    def shared_degrees(self) -> Mapping[str, int]:
        """Tensor-parallel, pipeline-parallel and context-parallel sizes."""
        return {axis: self.run.parallelism.size(axis) for axis in ("tp", "pp", "cp")}

    @property
    def rng_seed_rank(self) -> int:
        """First of the tensor-parallel and context-parallel ranks that compute on this rank's samples.

        A step of the user's own then draws the same numbers on all of them; dropout differs where it has to.
        """
        rank, parallelism = self.run.session.rank, self.run.parallelism
        return rank - rank % (parallelism.size("tp") * parallelism.size("cp"))

"""Role of a backend: how models and samples are split over ranks."""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch
from torch import nn

from accel_backends.core.run import Run
from accel_backends.parallel.capacity import capacity_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Attention = Callable[..., torch.Tensor]
"""Function of queries, keys and values (samples, tokens, heads, head size) and further arguments, to the same shape."""


class ReplicatedLayout:
    """Parallel layout of full models and full samples, one replica on each rank; base of other layouts.

    Attributes:
        run: processes and options of the backend.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self._capacity = capacity_of(run.parallelism)

    @property
    def degrees(self) -> tuple[int, int]:
        """Number of replicas of a model, and shard degree of each replica. Default: one replica per rank, unsharded."""
        return self.run.session.world_size, 1

    @property
    def shared_degrees(self) -> Mapping[str, int]:
        """Number of ranks over which each sample is split, by axis of ``ParallelismConfig``. Default: no axis."""
        return {}

    @property
    def rng_seed_rank(self) -> int:
        """Rank whose random seed this rank uses.

        Default: the first rank of this rank's tensor-parallel group, whose ranks draw the same dropout masks.
        """
        rank = self.run.session.rank
        return rank - rank % self.run.parallelism.size("tp")

    @property
    def sequence_group(self) -> "ProcessGroup | None":
        """Sequence-parallel group of this rank, in the order of the sequence; None: full sequences. Default: None.

        The first read is a collective.

        Collective: every rank of the group must call this.
        """
        return None

    def sequence_attention(self, attention: Attention) -> Attention:
        """Wraps an attention function for sequence parallelism: called on parts of sequences, attends over all of them.

        The model calls the returned function, which takes and returns this rank's tokens of all heads; within it
        ``attention`` receives all tokens of some of the heads. Default: ``attention`` itself.

        Collective: every rank of the group must call this.
        """
        return attention

    def take_choices(self) -> torch.Tensor | None:
        """Numbers of dropped and of all choices of experts on this rank (int64, 2) since the last call.

        None: experts have no capacity. Default: those that ``bound_experts`` counts.
        """
        return None if self._capacity is None else self._capacity.take_counts_on(self.run.session.device.torch)

    def check_experts(self, model: nn.Module) -> None:
        """Refuses a model without experts, if the run's options give these a capacity; without communication.

        Raises:
            PrepareError: the model has no experts.
        """
        if self._capacity is not None:
            from accel_backends.parallel.expert_parallel import check_bounded_experts

            check_bounded_experts(model)

    def bound_experts(self, model: nn.Module) -> None:
        """Bounds the choices that a model's experts compute in training, in place, if these have a capacity."""
        if self._capacity is not None:
            from accel_backends.parallel.expert_parallel import bound_experts

            bound_experts(model, self._capacity)

    def sharded_buffers(
        self, buffers: Sequence[torch.Tensor], dims: Sequence[int], kept: Collection[torch.Tensor] = ()
    ) -> AbstractContextManager[None]:
        """Context in which each buffer is, in place, this rank's shard of full sequences along its dim.

        Buffers are full again afterwards, except those of ``kept``. Default: buffers stay full.
        """
        return nullcontext()

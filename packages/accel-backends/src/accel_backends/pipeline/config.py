"""Options of pipeline parallelism."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch

from accel_backends.core.config import BackendConfig, Resolution, StrategyFacts
from accel_backends.core.option_parsing import as_number
from accel_backends.parallel.pipeline.schedules import check_microbatches, schedule_kind
from accel_state.errors import ConfigError
from accel_state.parallelism.config import ParallelismConfig

MicroBatchLoss = Callable[[Any, Mapping[str, Any]], torch.Tensor]
"""Function of the model's output for a micro-batch and of the arguments of the call, to a mean over samples."""


@dataclass(slots=True)
class PipelineParallelConfig(BackendConfig):
    """Options of pipeline parallelism, whose degree is ``ParallelismConfig.pp_size``.

    Attributes:
        num_microbatches: equal micro-batches into which each batch of a rank is split; None: one for each rank of the
            pipeline.
        schedule: "1f1b", "gpipe", "interleaved", "interleaved_zero_bubble" or "zero_bubble_v".
        stages_per_rank: stages of each rank; None: 1, or 2 with the last three schedules.
        split: number of blocks of each stage, first stage first; None: stages whose parameters are about equally large.
        loss_fn: loss of a micro-batch, if the model does not compute it from ``labels``: a function of the model's
            output and the arguments of the call, to a mean over samples. It is called on the last stage, in training.
        outputs: ranks that receive the outputs of an evaluation: "all", or "last", those of the last stage.
    """

    backend: ClassVar[str] = "pipeline"
    axes: ClassVar[frozenset[str]] = frozenset({"pp", "dp_replicate", "dp_shard", "ep", "cp", "sp", "tp"})
    needs_ranks: ClassVar[bool] = True

    num_microbatches: int | None = None
    schedule: str = "1f1b"
    stages_per_rank: int | None = None
    split: Sequence[int] | None = None
    loss_fn: MicroBatchLoss | None = None
    outputs: Literal["all", "last"] = "all"

    def __post_init__(self) -> None:
        for name in ("num_microbatches", "stages_per_rank"):
            if getattr(self, name) is not None:
                setattr(self, name, as_number(name, getattr(self, name)))
        schedule_kind(self.schedule, self.stages_per_rank)
        if self.num_microbatches is not None and self.num_microbatches < 1:
            raise ConfigError(f"num_microbatches is {self.num_microbatches}; expected a whole number of at least 1")
        if self.outputs not in ("all", "last"):
            raise ConfigError(f"outputs is {self.outputs!r}; expected 'all' or 'last'")

    @property
    def bounds_experts(self) -> bool:
        """Whether undivided experts get their capacity: always."""
        return True

    @classmethod
    def serves(cls, axes: Collection[str]) -> bool:
        """Whether ``axes`` has the pipeline's axis, and no axis beside it that pipelines do not compose with."""
        return "pp" in axes and cls.axes.issuperset(axes)

    def resolve(self, facts: StrategyFacts) -> Resolution:
        """Returns these options; without a degree, all ranks are one pipeline.

        Raises:
            ConfigError: a number of micro-batches with which the schedule does not run; a schedule with several stages
                on each rank before torch 2.11; ``loss_fn`` with shards of sequences.
            TopologyError: the product of the degrees is not the number of processes.
        """
        degrees = facts.parallelism
        if degrees.total_size == 1 and "pp" in facts.open_axes:
            degrees = replace(degrees, pp_size=facts.topology.world_size)
        found = BackendConfig.resolve(self, replace(facts, parallelism=degrees))
        size = found.parallelism.size("pp")
        self._check_loss(found.parallelism)
        micro = self.num_microbatches or size
        check_microbatches(self.schedule, micro, size)
        _, per_rank = schedule_kind(self.schedule, self.stages_per_rank)
        stages = f"{size * per_rank} stages on {size} ranks" if per_rank > 1 else f"{size} stages"
        reason = f"pipeline of {stages}, schedule {self.schedule}, {micro} micro-batches in each batch"
        return Resolution(found.config, found.parallelism, found.implied, (reason,))

    def _check_loss(self, parallelism: ParallelismConfig) -> None:
        axis = next((one for one in ("cp", "sp") if parallelism.size(one) > 1), None)
        if axis is not None and self.loss_fn is not None:
            raise ConfigError(
                f"loss_fn with {axis}_size={parallelism.size(axis)}: it would see the tokens of one rank, whose mean "
                "over samples is not that of full sequences; nearest: pass labels to the model, whose loss is that of "
                "all tokens"
            )

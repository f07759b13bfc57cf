"""Layout of a pipeline: every rank has stages of a model, and full samples."""

from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from math import prod
from typing import final

import torch

from accel_backends.core.run import Run
from accel_backends.parallel.axes import ModelAxes
from accel_backends.roles.layout import ReplicatedLayout


@final
class PipelineLayout(ReplicatedLayout):
    """Replicas of a pipeline, whose stages may be sharded over the ranks of other axes.

    ``axes``: those that the backend applies within stages.
    """

    def __init__(self, run: Run, axes: ModelAxes) -> None:
        super().__init__(run)
        self._axes = axes

    @property
    def degrees(self) -> tuple[int, int]:
        """Number of replicas of the pipeline, and shard degree of its stages."""
        degrees = self.run.parallelism
        return degrees.size("dp_replicate"), prod(degrees.size(axis) for axis in ("dp_shard", "ep", "cp", "sp"))

    @property
    def shared_degrees(self) -> Mapping[str, int]:
        """Number of ranks that compute on the same samples, by axis."""
        degrees = self.run.parallelism
        return {axis: degrees.size(axis) for axis in ("pp", "cp", "sp", "tp") if degrees.size(axis) > 1}

    def take_choices(self) -> torch.Tensor | None:
        """Numbers of dropped and of all choices of this rank's experts, where these have a capacity."""
        return self._axes.take_choices(self.run.session.device.torch)

    def sharded_buffers(
        self, buffers: Sequence[torch.Tensor], dims: Sequence[int], kept: Collection[torch.Tensor] = ()
    ) -> AbstractContextManager[None]:
        """Context in which each buffer is, in place, this rank's shard of context or sequence parallelism."""
        inputs = self._axes.inputs
        return super().sharded_buffers(buffers, dims) if inputs is None else inputs.sharded_buffers(buffers, dims, kept)

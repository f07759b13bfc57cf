"""Layout of a pipeline: every rank has stages of a model, and full samples."""

from collections.abc import Mapping
from typing import final

from accel_backends.roles.layout import ReplicatedLayout


@final
class PipelineLayout(ReplicatedLayout):
    """Replicas of a pipeline, whose stages may be sharded over data-parallel and tensor-parallel ranks."""

    @property
    def degrees(self) -> tuple[int, int]:
        """Number of replicas of the pipeline, and shard degree of its stages over data-parallel ranks."""
        degrees = self.run.parallelism
        return degrees.size("dp_replicate"), degrees.size("dp_shard")

    @property
    def shared_degrees(self) -> Mapping[str, int]:
        """Number of ranks that compute on the same samples, by axis."""
        degrees = self.run.parallelism
        return {axis: degrees.size(axis) for axis in ("pp", "tp") if degrees.size(axis) > 1}

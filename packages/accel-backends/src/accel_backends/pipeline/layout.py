"""Layout of a pipeline: every rank has stages of a model, and full samples."""

from collections.abc import Mapping
from typing import final

from accel_backends.roles.layout import ReplicatedLayout


@final
class PipelineLayout(ReplicatedLayout):
    """Replicas of a pipeline; no tensor is sharded."""

    @property
    def degrees(self) -> tuple[int, int]:
        """Number of replicas of the pipeline, and a shard degree of one."""
        return self.run.parallelism.data_parallel_size, 1

    @property
    def shared_degrees(self) -> Mapping[str, int]:
        """Number of ranks that compute on the same samples."""
        return {"pp": self.run.parallelism.size("pp")}

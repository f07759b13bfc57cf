"""Position of an Accelerator in the device mesh: its shard of the model and of the data."""

from abc import ABC
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from accel_state import ParallelismConfig
    from accel_state.session import Session


class MeshFacet(ABC):
    """Positions along the axes are computed from the rank, without communication."""

    session: "Session"
    parallelism_config: "ParallelismConfig"

    @property
    def torch_device_mesh(self) -> "DeviceMesh | None":
        """The mesh of all processes, with an axis for each degree above 1; None without such a degree.

        Collective: every rank of the group must call this. Later accesses are local.
        """
        return self.parallelism_config.get_device_mesh(self.session.device.type)

    @property
    def data_parallel_rank(self) -> int:
        """Index of the model replica of which this process holds all or a shard; 0 if there is one replica."""
        return self._along("dp_replicate")

    @property
    def data_parallel_shard_rank(self) -> int:
        """Index of this process's shard of its replica; 0 if the model is not sharded."""
        return self._along("dp_shard")

    @property
    def tensor_parallel_rank(self) -> int:
        """Index of this process in its tensor-parallel group; 0 without tensor parallelism."""
        return self._along("tp")

    @property
    def context_parallel_rank(self) -> int:
        """Index of this process in its context-parallel group; 0 without context parallelism."""
        return self._along("cp")

    @property
    def pipeline_parallel_rank(self) -> int:
        """Index of this process's pipeline stage; 0 without pipeline parallelism."""
        return self._along("pp")

    @property
    def should_save_model(self) -> bool:
        """Whether this process holds a shard of the first replica; these processes together hold the full model.

        For your own files: all processes call ``save_state`` and ``save_model``, which distribute the work.
        """
        place = self.parallelism_config.coordinates(self.session.rank)
        return not any(place[axis] for axis in ("dp_replicate", "cp", "sp"))

    def _along(self, axis: str) -> int:
        return self.parallelism_config.coordinates(self.session.rank)[axis]

"""An Accelerator's place in the mesh of all processes: its part of the model and of the data."""

from abc import ABC
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from accel_state import ParallelismConfig
    from accel_state.session import Session


class MeshFacet(ABC):
    """Places along the axes are numbers that follow from the rank; nothing is communicated for them."""

    session: "Session"
    parallelism_config: "ParallelismConfig"

    @property
    def torch_device_mesh(self) -> "DeviceMesh | None":
        """The mesh of all processes, an axis for each degree above 1; None where there is none.

        It is made when it is first asked for, which all processes have to do then.
        """
        return self.parallelism_config.get_device_mesh(self.session.device.type)

    @property
    def data_parallel_rank(self) -> int:
        """Which of the model's replicas this process has, or a part of; 0 where there is one."""
        return self._along("dp_replicate")

    @property
    def data_parallel_shard_rank(self) -> int:
        """Which shard of its replica this process has; 0 where the model is whole."""
        return self._along("dp_shard")

    @property
    def tensor_parallel_rank(self) -> int:
        """Which part of each layer this process computes; 0 where it computes all of it."""
        return self._along("tp")

    @property
    def context_parallel_rank(self) -> int:
        """Which part of each sequence this process computes; 0 where it computes all of it."""
        return self._along("cp")

    @property
    def pipeline_parallel_rank(self) -> int:
        """Which stage of the model this process has; 0 where it has all of them."""
        return self._along("pp")

    @property
    def should_save_model(self) -> bool:
        """This process has a part of the first replica, so all such processes together have the full model.

        For files of one's own: ``save_state`` and ``save_model`` are for all processes, and share the work.
        """
        place = self.parallelism_config.coordinates(self.session.rank)
        return not any(place[axis] for axis in ("dp_replicate", "cp", "sp"))

    def _along(self, axis: str) -> int:
        return self.parallelism_config.coordinates(self.session.rank)[axis]

"""Device mesh that models are sharded over."""

from typing import TYPE_CHECKING, Any, cast, final

from accel_backends.core.run import Run
from accel_backends.fsdp.config import FSDPConfig
from accel_backends.roles.layout import ReplicatedLayout

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from accel_state.session import Session


@final
class ShardingMesh:
    """Mesh of replicas times shards over a session's ranks; created on first use.

    Attributes:
        degrees: number of replicas, and shard degree of each.
    """

    def __init__(self, session: "Session", config: FSDPConfig, *, flat: bool = False) -> None:
        """Computes the degrees. ``flat``: the mesh has one dimension if there is no sharding, or no replication.

        Raises:
            ConfigError: degrees that do not divide the number of ranks.
        """
        self.degrees = config.degrees(session.world_size, session.topology.local_world_size)
        self._session = session
        self._flat = flat
        self._mesh: DeviceMesh | None = None
        self._owns_group = False

    @property
    def mesh(self) -> "DeviceMesh":
        """The mesh, whose last dimension shards. The first read is a collective.

        Collective: every rank of the group must call this.
        """
        if self._mesh is None:
            from torch.distributed.device_mesh import init_device_mesh

            self._ensure_group()
            names: tuple[str, ...] = ("dp_replicate", "dp_shard")
            shape: tuple[int, ...] = self.degrees
            if self.degrees[0] == 1 or (self._flat and self.degrees[1] == 1):
                shape, names = (self._session.world_size,), names[1:]
            self._mesh = init_device_mesh(self._session.device.type, shape, mesh_dim_names=names)
        return self._mesh

    def close(self) -> None:
        """Drops the mesh, and destroys the process group of a single process."""
        self._mesh = None
        if self._owns_group:
            import torch.distributed as dist

            self._owns_group = False
            if dist.is_initialized():
                dist.destroy_process_group()

    def _ensure_group(self) -> None:
        """Opens a process group of one process if there is none, because torch shards over process groups only."""
        import torch.distributed as dist

        if not dist.is_initialized():
            backend = self._session.device.collective_backend
            dist.init_process_group(backend, store=cast(Any, dist).HashStore(), rank=0, world_size=1)
            self._owns_group = True


@final
class MeshLayout(ReplicatedLayout):
    """Layout of models that are sharded over ``mesh``."""

    def __init__(self, run: Run, mesh: ShardingMesh) -> None:
        super().__init__(run)
        self._sharding = mesh

    @property
    def degrees(self) -> tuple[int, int]:
        """Number of replicas and shard degree, from the options."""
        return self._sharding.degrees

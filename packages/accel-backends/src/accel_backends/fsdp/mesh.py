"""Device mesh that models are sharded over."""

from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from math import prod
from typing import TYPE_CHECKING, Any, cast, final

import torch

from accel_backends.core.run import Run
from accel_backends.fsdp.config import FSDPConfig
from accel_backends.ops.dtensor import over_axes
from accel_backends.parallel.axes import ModelAxes
from accel_backends.roles.layout import ReplicatedLayout
from accel_state.parallelism.config import ParallelismConfig

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from accel_state.session import Session


@final
class ShardingMesh:
    """Mesh of replicas times shards over a session's ranks, with a tensor-parallel axis within; created on first use.

    Attributes:
        degrees: number of replicas, and shard degree of each: data-parallel and context-parallel ranks together.
        tensor_size: number of tensor-parallel ranks.
        context_size: number of context-parallel ranks.
    """

    def __init__(
        self,
        session: "Session",
        config: FSDPConfig,
        parallelism: ParallelismConfig | None = None,
        *,
        flat: bool = False,
    ) -> None:
        """Computes the degrees. ``flat``: the mesh has one dimension if there is no sharding, or no replication.

        Raises:
            ConfigError: degrees that do not divide the number of ranks.
        """
        self.tensor_size = 1 if parallelism is None else parallelism.size("tp")
        self.context_size = 1 if parallelism is None else parallelism.size("cp")
        replicas, shards = config.data_degrees(session.topology, self.tensor_size * self.context_size)
        self.degrees = replicas, shards * self.context_size
        self._session = session
        self._flat = flat
        self._mesh: DeviceMesh | None = None
        self._axes: dict[str, DeviceMesh] = {}
        self._every: DeviceMesh | None = None
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
                shape, names = (prod(self.degrees),), names[1:]
            device = self._session.device.type
            if self.tensor_size == 1:
                self._mesh = init_device_mesh(device, shape, mesh_dim_names=names)
            else:  # one mesh for both, because ``fully_shard`` joins the axes of a parameter
                self._every = init_device_mesh(device, (*shape, self.tensor_size), mesh_dim_names=(*names, "tp"))
                self._mesh, self._axes["tp"] = self._every[names], self._every["tp"]
        return self._mesh

    def axis(self, name: str) -> "DeviceMesh":
        """Mesh of one axis, "tp" or "cp".

        Collective: every rank of the group must call this. That holds for the first call with a name.
        """
        if name == "tp":
            _ = self.mesh  # whose first read makes this axis, too
        if name not in self._axes:
            from torch.distributed.device_mesh import init_device_mesh

            self._ensure_group()
            shape = prod(self.degrees) // self.context_size, self.context_size, self.tensor_size
            every = init_device_mesh(self._session.device.type, shape, mesh_dim_names=("dp", "cp", "tp"))
            self._axes[name] = every[name]
        return self._axes[name]

    def over_all_ranks(self, value: Any) -> Any:
        """The same DTensor over all axes, a replica on each tensor-parallel rank, if it is over data-parallel ones.

        Shares its memory. Other values are returned unchanged.
        """
        return value if self._every is None else over_axes(value, self._every)

    def close(self) -> None:
        """Drops the mesh, and destroys the process group of a single process."""
        self._mesh = self._every = None
        self._axes.clear()
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
    """Layout of models that are sharded over ``mesh``; ``axes``: the axes that the backend applies before."""

    def __init__(self, run: Run, mesh: ShardingMesh, axes: ModelAxes | None = None) -> None:
        super().__init__(run)
        self._sharding, self._axes = mesh, axes

    @property
    def degrees(self) -> tuple[int, int]:
        """Number of replicas and shard degree, from the options."""
        return self._sharding.degrees

    @property
    def shared_degrees(self) -> Mapping[str, int]:
        """Sizes of the axes whose ranks compute on the same samples: tensor and context parallelism."""
        sizes = {"tp": self._sharding.tensor_size, "cp": self._sharding.context_size}
        return {axis: size for axis, size in sizes.items() if size > 1}

    @property
    def rng_seed_rank(self) -> int:
        """First rank of this rank's tensor-parallel group, whose ranks draw the same dropout masks."""
        rank = self.run.session.rank
        return rank - rank % self._sharding.tensor_size

    def sharded_buffers(
        self, buffers: Sequence[torch.Tensor], dims: Sequence[int], kept: Collection[torch.Tensor] = ()
    ) -> AbstractContextManager[None]:
        """Context in which each buffer is, in place, this rank's shard for its context-parallel group."""
        inputs = None if self._axes is None else self._axes.inputs
        return super().sharded_buffers(buffers, dims) if inputs is None else inputs.sharded_buffers(buffers, dims, kept)

"""Mesh of a run with a pipeline, and its parts: ranks of one pipeline, and ranks that share the stages of this rank."""

from typing import TYPE_CHECKING, Any, cast, final

from accel_backends.ops.dtensor import over_axes

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from accel_backends.core.run import Run


@final
class StageMesh:
    """Axes of a run's mesh, the pipeline outermost.

    Attributes:
        pipeline: ranks of this rank's pipeline, in the order of their first stages.
        every: axes over the ranks that share this rank's stages; None: no other rank has them.
        sharding: data-parallel axes over which parameters are sharded, the last one shards; None: they are not sharded.
        tensor: the tensor-parallel axis; None without it.
        data: ranks that average their gradients with this one; None without data-parallel axes.
    """

    def __init__(self, run: "Run", device_type: str) -> None:
        """Builds the mesh.

        Collective: every rank of the group must call this.
        """
        degrees = run.parallelism
        built = degrees.get_device_mesh(device_type)
        assert built is not None
        mesh = cast(Any, built)
        names = tuple(name for name in degrees.active_mesh_dims if name != "pp")
        data = tuple(degrees.dp_dim_names)
        self._whole, self._ends = built, None if degrees.pp_size != 2 else built
        self.pipeline: ProcessGroup = mesh["pp"].get_group()
        self.every: DeviceMesh | None = mesh[names] if names else None
        self.sharding: DeviceMesh | None = mesh[data] if degrees.dp_shard_enabled else None
        self.tensor: DeviceMesh | None = mesh["tp"] if degrees.tp_enabled else None
        self.data: ProcessGroup | None = mesh["dp"].get_group() if data else None

    def axis(self, name: str) -> "DeviceMesh":
        """Mesh of one axis of the stage's ranks."""
        assert self.every is not None
        return self.every[name]

    def join_ends(self) -> None:
        """Makes the mesh of the ranks with the first or the last stage, for weights that both have.

        Collective: every rank of the run must call this.
        """
        if self._ends is None and self.every is not None:
            from torch.distributed.device_mesh import DeviceMesh

            ranks = self._whole.mesh[[0, -1]]
            self._ends = DeviceMesh(self._whole.device_type, ranks, mesh_dim_names=self._whole.mesh_dim_names)

    def over_stage_ranks(self, value: Any, *, tied: bool = False) -> Any:
        """The same DTensor over all axes of the ranks that have it, a replica along those that it does not have.

        ``tied``: the first and the last stage have it. Shares its memory. Other values are returned unchanged.
        """
        mesh = self._ends if tied else self.every
        return value if mesh is None else over_axes(value, mesh)

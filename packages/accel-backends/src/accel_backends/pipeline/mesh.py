"""Mesh of a run with a pipeline, and its parts: ranks of one pipeline, and ranks that share the stages of this rank."""

from collections.abc import Mapping
from math import prod
from typing import TYPE_CHECKING, Any, Final, cast, final

from accel_backends.ops.dtensor import is_dtensor, over_axes

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from accel_backends.core.run import Run
    from accel_state.parallelism.config import ParallelismConfig


_SHARDING: Final = ("dp_shard", "ep", "cp", "sp")
"""Axes over which parameters are sharded together, neighbours in the run's mesh."""


@final
class StageMesh:
    """Axes of a run's mesh, the pipeline outermost.

    Ranks with other shards of the same sequences compute on other tokens, so parameters are sharded over them as over
    data-parallel ranks, and gradients are averaged over both.

    Attributes:
        pipeline: ranks of this rank's pipeline, in the order of their first stages.
        sharded_by: degrees of the axes that shard stages, as "cp_size"; empty: none.
        every: axes over the ranks that share this rank's stages; None: no other rank has them.
        sharding: axes over which parameters are sharded, the last one shards; None: they are not sharded.
        tensor: the tensor-parallel axis; None without it.
        data: ranks that average their gradients with this one; None without such axes.
        experts: axes over which the experts of an expert-parallel rank are sharded; None without expert parallelism.
        expert_shards: number of ranks of their last axis.
    """

    def __init__(self, run: "Run", device_type: str) -> None:
        """Builds the mesh.

        Collective: every rank of the group must call this.
        """
        degrees = run.parallelism
        built = degrees.get_device_mesh(device_type)
        assert built is not None
        self._axes = built
        sizes = {
            "pp": degrees.size("pp"),
            "dp_replicate": degrees.size("dp_replicate"),
            "dp_shard": prod(map(degrees.size, _SHARDING)),
            "tp": degrees.size("tp"),
        }
        self.sharded_by = tuple(f"{axis}_size" for axis in _SHARDING if degrees.size(axis) > 1)
        joined = any(degrees.size(axis) > 1 for axis in _SHARDING[1:])
        self._whole = _joined(built, sizes) if joined else built
        mesh = cast(Any, self._whole)
        names = tuple(name for name in sizes if name != "pp" and sizes[name] > 1)
        data = tuple(name for name in names if name != "tp")
        self._ends = None if degrees.size("pp") != 2 else self._whole
        self.pipeline: ProcessGroup = mesh["pp"].get_group()
        self.every: DeviceMesh | None = mesh[names] if names else None
        self.sharding: DeviceMesh | None = mesh[data] if sizes["dp_shard"] > 1 else None
        self.tensor: DeviceMesh | None = mesh["tp"] if degrees.tp_enabled else None
        self._divided: DeviceMesh | None = None
        self.experts: DeviceMesh | None = None
        self.expert_shards = sizes["dp_shard"] // degrees.size("ep")
        if degrees.size("ep") > 1:
            self._divide(sizes, degrees)
        self.data: ProcessGroup | None = None
        if len(data) == 1:
            self.data = mesh[data[0]].get_group()
        elif data:
            self.data = (mesh[data]._flatten("dp") if joined else mesh["dp"]).get_group()

    def axis(self, name: str) -> "DeviceMesh":
        """Mesh of one axis of the stage's ranks."""
        mesh = cast(Any, self._divided if name == "ep" else self._whole if name == "tp" else self._axes)
        found: DeviceMesh = mesh[name]
        return found

    def _divide(self, sizes: Mapping[str, int], degrees: "ParallelismConfig") -> None:
        """Makes the mesh with the axis ``ep`` behind that over which experts are sharded.

        Both are slices of one mesh, because ``fully_shard`` joins the axes of a DTensor. Ranks with other shards of the
        same sequences shard experts as data-parallel ranks do.

        Collective: every rank of the run must call this.
        """
        from torch.distributed.device_mesh import DeviceMesh

        size, inner = degrees.size("ep"), degrees.size("cp") * degrees.size("sp")
        outer = self._axes.mesh.reshape(sizes["pp"], sizes["dp_replicate"], degrees.size("dp_shard"), size, inner, -1)
        shape = {**sizes, "dp_shard": self.expert_shards, "ep": size}
        names = ("pp", "dp_replicate", "dp_shard", "ep", "tp")
        active = tuple(name for name in names if shape[name] > 1 or name == "dp_shard")
        ordered = outer.transpose(3, 4).reshape([shape[name] for name in active])
        self._divided = DeviceMesh(self._axes.device_type, ordered, mesh_dim_names=active)
        over = tuple(name for name in active if name in ("dp_replicate", "dp_shard"))
        self.experts = cast(Any, self._divided)[over]

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
        if self._divided is not None and is_dtensor(value) and "ep" in (value.device_mesh.mesh_dim_names or ()):
            names = self._divided.mesh_dim_names
            mesh = cast(Any, self._divided)[names[1:]] if names else None
        return value if mesh is None else over_axes(value, mesh)


def _joined(built: "DeviceMesh", sizes: Mapping[str, int]) -> "DeviceMesh":
    """Mesh of the same ranks whose axis ``dp_shard`` has all axes over which parameters are sharded.

    Collective: every rank of the run must call this.
    """
    from torch.distributed.device_mesh import DeviceMesh

    active = {name: size for name, size in sizes.items() if size > 1}
    return DeviceMesh(built.device_type, built.mesh.view(*active.values()), mesh_dim_names=tuple(active))

"""Degrees of each kind of parallelism, and the device mesh built from them."""

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from math import prod
from typing import TYPE_CHECKING, Any, Final, final

from accel_state.errors import ConfigError, TopologyError, did_you_mean
from accel_state.parallelism.axis_options import (
    PREFIX,
    DeepSpeedSequenceParallelConfig,
    ExpertParallelConfig,
    TorchContextParallelConfig,
    TorchTensorParallelConfig,
    whole_number,
)
from accel_state.topology import Topology

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

# Outermost first: the axis with the least communication is outermost. The last axis varies fastest with the rank, so
# that tensor-parallel ranks are neighbours.
MESH_AXES: Final = ("pp", "dp_replicate", "dp_shard", "ep", "cp", "sp", "tp")
_DATA_AXES: Final = ("dp_replicate", "dp_shard", "ep")


@final
@dataclass(frozen=True, slots=True)
class DataShard:
    """Shard ``index`` of ``count`` of the samples.

    Ranks that compute on the same samples (tensor, context, sequence, pipeline parallelism) have equal shards.

    Raises:
        TopologyError: ``index`` is not below ``count``.
    """

    index: int = 0
    count: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.count:
            raise TopologyError(f"data shard index={self.index} is not below count={self.count}")


@final
@dataclass(frozen=True)
class ParallelismConfig:
    """Degrees of parallelism; their product is the world size.

    Expert-parallel ranks (``ep_size``) read different samples, as data-parallel ranks do.

    A size of None is read from ``PARALLELISM_CONFIG_<NAME>_SIZE`` (default 1), a backend of None from
    ``PARALLELISM_CONFIG_CP_BACKEND`` ("torch") and ``..._SP_BACKEND`` ("deepspeed"), whose defaults stand for any
    backend that serves the axis. The handlers hold the options of an axis; a missing handler is created with its
    defaults if the size of its axis is above 1. The capacity of ``ep_handler`` bounds undivided experts, too.

    Raises:
        ConfigError: a size below 1, a handler of the wrong type, or sizes that exclude each other.
    """

    dp_replicate_size: int | None = None
    dp_shard_size: int | None = None
    tp_size: int | None = None
    cp_size: int | None = None
    cp_backend: str | None = None
    sp_size: int | None = None
    sp_backend: str | None = None
    tp_handler: TorchTensorParallelConfig | None = None
    cp_handler: TorchContextParallelConfig | None = None
    sp_handler: DeepSpeedSequenceParallelConfig | None = None
    pp_size: int | None = None
    ep_size: int | None = None
    ep_handler: ExpertParallelConfig | None = None
    _mesh: "dict[str, DeviceMesh | None]" = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for axis in MESH_AXES:
            name = f"{axis}_size"
            size = getattr(self, name)
            if size is None:
                variable = f"{PREFIX}_{name.upper()}"
                size = whole_number(variable, os.environ.get(variable) or "1")
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise ConfigError(f"{name}={size!r}; expected a whole number of at least 1")
            object.__setattr__(self, name, size)
        for axis, default in _DEFAULT_BACKENDS.items():
            name = f"{axis}_backend"
            value = getattr(self, name) or os.environ.get(f"{PREFIX}_{name.upper()}") or default
            object.__setattr__(self, name, value)
        _check_together(self)
        for axis, kind in AXIS_OPTIONS.items():
            name = f"{axis}_handler"
            if getattr(self, name) is None and self.size(axis) > 1:
                object.__setattr__(self, name, kind())
            handler = getattr(self, name)
            if handler is not None and not isinstance(handler, kind):
                raise ConfigError(f"{name} must be a {kind.__name__}, got {type(handler).__name__}")

    def size(self, axis: str) -> int:
        """Returns the degree of one of the axes of ``MESH_AXES``."""
        if axis not in MESH_AXES:
            hint = did_you_mean(axis, MESH_AXES)
            raise ConfigError(f"no mesh axis {axis!r}; known: {', '.join(MESH_AXES)}{hint}")
        size: int = getattr(self, f"{axis}_size")
        return size

    def served_by(self, backend: str) -> "ParallelismConfig":
        """Returns these degrees with the name of the backend that serves the axes, where an axis has such a name.

        Raises:
            ConfigError: another backend was given for an axis of size above 1.
        """
        changes: dict[str, Any] = {}
        for axis, default in _DEFAULT_BACKENDS.items():
            name = f"{axis}_backend"
            given = getattr(self, name)
            if self.size(axis) == 1 or given == backend:
                continue
            if given != default:
                raise ConfigError(
                    f"{name}={given!r}, and the strategy that serves {axis}_size={self.size(axis)} is {backend!r}; "
                    f"leave {name} out, or use strategy={given!r}"
                )
            changes[name] = backend
        return replace(self, **changes) if changes else self

    def fitted(self, world_size: int) -> "ParallelismConfig":
        """Fits the degrees to ``world_size`` processes: if no degree is set, ``dp_replicate`` becomes the world size.

        A sequence-parallel backend that builds its own groups (DeepSpeed) lets the remaining factor become
        ``dp_replicate`` too.

        Raises:
            TopologyError: the product of the degrees does not match; names degrees that would.
        """
        if self.total_size == world_size:
            return self
        rest, left_over = divmod(world_size, self.total_size)
        free = self.total_size == 1 or (self._groups_elsewhere and self.data_parallel_size == 1)
        if free and not left_over:
            return replace(self, dp_replicate_size=rest)
        sizes = ", ".join(f"{axis}={self.size(axis)}" for axis in self.active_mesh_dims)
        raise TopologyError(
            f"the parallelism ({sizes}) needs {self.total_size} processes, which does not match num_processes="
            f"{world_size}; the product of the degrees must be {world_size}{self._nearest(world_size)}"
        )

    def _nearest(self, world_size: int) -> str:
        """Degrees, each of which would make the product ``world_size``; numbers of processes that fit if none does."""
        rest, left_over = divmod(world_size, self.total_size)
        if not left_over:
            return f", as with dp_shard_size={self.size('dp_shard') * rest}"
        others = {axis: self.total_size // self.size(axis) for axis in self.active_mesh_dims}
        fitting = [f"{axis}_size={world_size // rest}" for axis, rest in others.items() if world_size % rest == 0]
        counts = [count for count in (rest * self.total_size, (rest + 1) * self.total_size) if count]
        return f", as with {' or '.join(fitting or [f'num_processes={count}' for count in counts])}"

    def data_shard(self, topology: Topology) -> DataShard:
        """Returns the shard of the samples that the process at ``topology`` reads.

        Raises:
            TopologyError: the product of the degrees does not match the world size.
        """
        fitted = self.fitted(topology.world_size)
        place = fitted.coordinates(topology.rank)
        index = 0
        for axis in _DATA_AXES:
            index = index * fitted.size(axis) + place[axis]
        return DataShard(index, fitted.data_parallel_size)

    def coordinates(self, rank: int) -> dict[str, int]:
        """Returns the coordinate of ``rank`` along every axis of the mesh, including axes of size 1.

        Raises:
            TopologyError: ``rank`` is not below ``total_size``.
        """
        if not 0 <= rank < self.total_size:
            raise TopologyError(f"rank={rank} is outside the mesh of {self.total_size} processes")
        place = {}
        for axis in reversed(MESH_AXES):
            rank, place[axis] = divmod(rank, self.size(axis))
        return place

    def build_device_mesh(self, device_type: str) -> "DeviceMesh | None":
        """Builds a mesh over all processes with one axis per degree above 1, outermost first as in ``MESH_AXES``.

        Collective: every rank of the group must call this. Also creates the flattened submeshes "dp", "dp_shard_cp" and
        "dp_cp" if they have axes. Returns None if no degree is above 1, or if DeepSpeed builds the groups.
        """
        names, shape = self._get_mesh()
        if not names or self._groups_elsewhere:
            return None
        from torch.distributed.device_mesh import init_device_mesh

        mesh = init_device_mesh(device_type, shape, mesh_dim_names=names)
        for flat, parts in (
            ("dp", self.dp_dim_names),
            ("dp_shard_cp", self.dp_shard_cp_dim_names),
            ("dp_cp", self.dp_cp_dim_names),
        ):
            if parts:
                mesh[parts]._flatten(flat)  # type: ignore[index]  # torch takes lists, too
        return mesh

    def get_device_mesh(self, device_type: str | None = None) -> "DeviceMesh | None":
        """Returns the mesh of ``build_device_mesh``, built by the first call.

        Collective: every rank of the group must call this. That holds for the first call.

        Raises:
            ConfigError: the first call names no device type, or a later call names another one.
        """
        if not self._mesh:
            if device_type is None:
                raise ConfigError("the mesh is not built yet; name a device_type such as 'cuda' or 'cpu'")
            self._mesh[device_type] = self.build_device_mesh(device_type)
        ((built, mesh),) = self._mesh.items()
        if device_type not in {None, built}:
            raise ConfigError(f"the mesh was built for {built!r}; it cannot also be for {device_type!r}")
        return mesh

    def to_json(self) -> dict[str, Any]:
        """Returns all fields as JSON values; ``from_json`` is the inverse."""
        document: dict[str, Any] = {}
        for entry in fields(self):
            if entry.init:
                value = getattr(self, entry.name)
                document[entry.name] = asdict(value) if entry.name.endswith("_handler") and value is not None else value
        return document

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> "ParallelismConfig":
        """Builds the config from the result of ``to_json``.

        Raises:
            ConfigError: a key is unknown, or a value is invalid.
        """
        known = [entry.name for entry in fields(cls) if entry.init]
        for name in document:
            if name not in known:
                raise ConfigError(f"unknown key {name!r}{did_you_mean(name, known)}")
        values = dict(document)
        for axis, kind in AXIS_OPTIONS.items():
            options = values.get(f"{axis}_handler")
            if isinstance(options, Mapping):
                values[f"{axis}_handler"] = kind(**options)
        return cls(**values)

    @property
    def dp_dim_names(self) -> list[str]:
        """Axes along which ranks read different samples."""
        return self._active(*_DATA_AXES)

    @property
    def non_dp_dim_names(self) -> list[str]:
        """Axes along which ranks compute on the same samples."""
        return self._active("pp", "cp", "sp", "tp")

    @property
    def dp_shard_cp_dim_names(self) -> list[str]:
        """Axes over which FSDP shards parameters."""
        return self._active("dp_shard", "ep", "cp", *self._sequences_here)

    @property
    def dp_cp_dim_names(self) -> list[str]:
        """Axes over which the loss is averaged."""
        return self._active("dp_replicate", "dp_shard", "ep", "cp", *self._sequences_here)

    @property
    def fsdp_dim_names(self) -> list[str]:
        """Axes of the mesh for FSDP: the replication axis if its size is above 1, then the flattened sharding axis."""
        return [*self._active("dp_replicate"), "dp_shard_cp"]

    @property
    def active_mesh_dims(self) -> list[str]:
        """Axes of size above 1, outermost first."""
        return self._active(*MESH_AXES)

    @property
    def total_size(self) -> int:
        """World size that the degrees need."""
        return prod(self.size(axis) for axis in MESH_AXES)

    @property
    def data_parallel_size(self) -> int:
        """Number of different shards of the samples."""
        return prod(self.size(axis) for axis in _DATA_AXES)

    @property
    def non_data_parallel_size(self) -> int:
        """Number of processes that compute on the same samples."""
        return self.total_size // self.data_parallel_size

    @property
    def dp_replicate_enabled(self) -> bool:
        """Whether there are several replicas of the parameters."""
        return self.size("dp_replicate") > 1

    @property
    def dp_shard_enabled(self) -> bool:
        """Whether parameters are sharded over data-parallel ranks."""
        return self.size("dp_shard") > 1

    @property
    def tp_enabled(self) -> bool:
        """Whether layers are split over ranks (tensor parallelism)."""
        return self.size("tp") > 1

    @property
    def cp_enabled(self) -> bool:
        """Whether sequences are split over ranks, attention included (context parallelism)."""
        return self.size("cp") > 1

    @property
    def sp_enabled(self) -> bool:
        """Whether sequences are split over ranks, which exchange heads for tokens in attention (Ulysses)."""
        return self.size("sp") > 1

    @property
    def pp_enabled(self) -> bool:
        """Whether the model is split into pipeline stages."""
        return self.size("pp") > 1

    @property
    def ep_enabled(self) -> bool:
        """Whether experts are divided among ranks."""
        return self.size("ep") > 1

    @property
    def _groups_elsewhere(self) -> bool:
        return self.sp_enabled and self.sp_backend == DeepSpeedSequenceParallelConfig.backend

    @property
    def _sequences_here(self) -> tuple[str, ...]:
        """The sequence-parallel axis, if the mesh has it."""
        return () if self._groups_elsewhere else ("sp",)

    def _get_mesh(self) -> tuple[tuple[str, ...], tuple[int, ...]]:
        names = tuple(self.active_mesh_dims)
        return names, tuple(self.size(name) for name in names)

    def _active(self, *axes: str) -> list[str]:
        return [axis for axis in axes if self.size(axis) > 1]


AXIS_OPTIONS: Final[Mapping[str, type]] = {
    "tp": TorchTensorParallelConfig,
    "cp": TorchContextParallelConfig,
    "sp": DeepSpeedSequenceParallelConfig,
    "ep": ExpertParallelConfig,
}
_DEFAULT_BACKENDS: Final[Mapping[str, str]] = {
    axis: kind.backend for axis, kind in AXIS_OPTIONS.items() if hasattr(kind, "backend")
}


def _check_together(config: ParallelismConfig) -> None:
    if config.cp_enabled and config.sp_enabled:
        raise ConfigError(
            f"cp_size={config.cp_size} and sp_size={config.sp_size} are mutually exclusive: both split the sequence"
        )

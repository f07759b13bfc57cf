"""Device mesh that models are sharded over."""

from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from math import prod
from typing import TYPE_CHECKING, Any, final

import torch

from accel_backends.core.run import Run
from accel_backends.fsdp.config import FSDPConfig
from accel_backends.ops.dtensor import is_dtensor, over_axes
from accel_backends.parallel.axes import ModelAxes, SequenceAxis
from accel_backends.roles.layout import ReplicatedLayout
from accel_state.parallelism.config import ParallelismConfig
from accel_state.process_group.single_process_group import SingleProcessGroup

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from accel_state.session import Session


@final
class ShardingMesh:
    """Mesh of replicas times shards over a session's ranks, with a tensor-parallel axis within; created on first use.

    Attributes:
        degrees: number of replicas, and shard degree of each: data-parallel and expert-parallel ranks, and those of
            ``sequence``, together.
        tensor_size: number of tensor-parallel ranks.
        sequence: axis of context or sequence parallelism; None: sequences are full.
        expert_size: number of expert-parallel ranks.
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
        self.sequence = None if parallelism is None else SequenceAxis.of(parallelism)
        self.expert_size = 1 if parallelism is None else parallelism.size("ep")
        sequence_size = 1 if self.sequence is None else self.sequence.size
        beside = self.tensor_size * sequence_size * self.expert_size
        replicas, shards = config.data_degrees(session.topology, beside)
        self.degrees = replicas, shards * sequence_size * self.expert_size
        self._data_shards = shards
        self._session = session
        self._flat = flat
        self._mesh: DeviceMesh | None = None
        self._axes: dict[str, DeviceMesh] = {}
        self._every: DeviceMesh | None = None
        self._divided: DeviceMesh | None = None
        self._group = SingleProcessGroup(session.device)

    @property
    def mesh(self) -> "DeviceMesh":
        """The mesh, whose last dimension shards. The first read is a collective.

        Collective: every rank of the group must call this.
        """
        if self._mesh is None:
            from torch.distributed.device_mesh import init_device_mesh

            self._group.open()  # torch shards over process groups only
            names, shape = self._data_axes(self.degrees[1])
            device = self._session.device.type
            if self.tensor_size == 1:
                self._mesh = init_device_mesh(device, shape, mesh_dim_names=names)
            else:  # one mesh for both, because ``fully_shard`` joins the axes of a parameter
                self._every = init_device_mesh(device, (*shape, self.tensor_size), mesh_dim_names=(*names, "tp"))
                self._mesh, self._axes["tp"] = self._every[names], self._every["tp"]
        return self._mesh

    def axis(self, name: str) -> "DeviceMesh":
        """Mesh of one axis, "tp", "ep" or that of ``sequence``.

        Collective: every rank of the group must call this. That holds for the first call with a name.
        """
        if name == "ep":
            return self._with_experts()[1]
        if name == "tp":
            _ = self.mesh  # whose first read makes this axis, too
        if name not in self._axes:
            from torch.distributed.device_mesh import init_device_mesh

            self._group.open()
            assert self.sequence is not None
            size = self.sequence.size
            shape = prod(self.degrees) // size, size, self.tensor_size
            every = init_device_mesh(self._session.device.type, shape, mesh_dim_names=("dp", self.sequence.name, "tp"))
            self._axes[name] = every[name]
        return self._axes[name]

    @property
    def expert_shards(self) -> int:
        """Number of ranks over which the experts of an expert-parallel rank are sharded."""
        return self.degrees[1] // self.expert_size

    @property
    def experts(self) -> "DeviceMesh":
        """Mesh over which each expert-parallel rank's experts are sharded, as ``mesh`` is of everything else.

        Collective: every rank of the group must call this. That holds for the first read.
        """
        return self._with_experts()[0]

    def over_all_ranks(self, value: Any) -> Any:
        """The same DTensor over all axes, a replica on each tensor-parallel rank, if it is over data-parallel ones.

        Shares its memory. Other values are returned unchanged.
        """
        if self._every is None:
            return value
        of_experts = is_dtensor(value) and "ep" in (value.device_mesh.mesh_dim_names or ())
        return over_axes(value, self._divided if of_experts else self._every)

    def close(self) -> None:
        """Drops the mesh, and destroys the process group of a single process."""
        self._mesh = self._every = self._divided = None
        self._axes.clear()
        self._group.close()

    def _data_axes(self, shards: int) -> tuple[tuple[str, ...], tuple[int, ...]]:
        """Names and sizes of the data-parallel axes, where each replica has so many shards."""
        replicas = self.degrees[0]
        if replicas == 1 or (self._flat and shards == 1):
            return ("dp_shard",), (replicas * shards,)
        return ("dp_replicate", "dp_shard"), (replicas, shards)

    def _with_experts(self) -> "tuple[DeviceMesh, DeviceMesh]":
        """The mesh that experts are sharded over, and the axis "ep".

        Both are slices of one mesh, because ``fully_shard`` joins the axes of a DTensor. Ranks with other shards of the
        same sequences compute on other tokens, and shard experts as data-parallel ranks do; tensor-parallel ranks
        compute on the same tokens, and hold the same experts.
        """
        names, shape = self._data_axes(self.expert_shards)
        if self._divided is None:
            from torch.distributed.device_mesh import DeviceMesh

            self._group.open()
            sequences = self.expert_shards // self._data_shards
            ranks = torch.arange(prod(self.degrees) * self.tensor_size)
            ranks = ranks.view(self.degrees[0], self._data_shards, self.expert_size, sequences, self.tensor_size)
            shape, every = (*shape, self.expert_size), (*names, "ep")
            if self.tensor_size > 1:
                shape, every = (*shape, self.tensor_size), (*every, "tp")
            ordered = ranks.transpose(2, 3).reshape(shape)
            self._divided = DeviceMesh(self._session.device.type, ordered, mesh_dim_names=every)
        return self._divided[names], self._divided["ep"]


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
        """Sizes of the axes whose ranks compute on the same samples: tensor, context and sequence parallelism."""
        sizes = {"tp": self._sharding.tensor_size}
        if (sequence := self._sharding.sequence) is not None:
            sizes[sequence.name] = sequence.size
        return {axis: size for axis, size in sizes.items() if size > 1}

    def take_choices(self) -> torch.Tensor | None:
        """Numbers of dropped and of all choices of experts, where these have a capacity."""
        return None if self._axes is None else self._axes.take_choices(self.run.session.device.torch)

    def sharded_buffers(
        self, buffers: Sequence[torch.Tensor], dims: Sequence[int], kept: Collection[torch.Tensor] = ()
    ) -> AbstractContextManager[None]:
        """Context in which each buffer is, in place, this rank's shard of context or sequence parallelism."""
        inputs = None if self._axes is None else self._axes.inputs
        return super().sharded_buffers(buffers, dims) if inputs is None else inputs.sharded_buffers(buffers, dims, kept)

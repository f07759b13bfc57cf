"""Parallel layout of models and samples under DeepSpeed."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from accel_backends.core.run import Run
from accel_backends.roles.layout import Attention, ReplicatedLayout
from accel_deepspeed.tensor_parallel.autotp import Layers
from accel_deepspeed.ulysses.sequence import SequenceAttention, Sequences

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from accel_deepspeed.config.plugin import DeepSpeedConfig


class ZeroLayout(ReplicatedLayout):
    """Parallel layout of the backend: ZeRO over all ranks, sequence or tensor parallelism over neighbouring ranks."""

    def __init__(
        self,
        run: Run,
        options: "DeepSpeedConfig",
        sequences: Sequences,
        layers: Layers,
        open_communication: Callable[[], None],
    ) -> None:
        super().__init__(run)
        self.options = options
        self._sequences, self._layers = sequences, layers
        self._open_communication = open_communication
        self._mesh: DeviceMesh | None = None

    @property
    def degrees(self) -> tuple[int, int]:
        """Replicas and shard degree: one sharded replica from stage 1 on, or with AutoTP.

        Otherwise one replica per rank. Ranks of one sequence-parallel or tensor-parallel group count once.
        """
        world = self.run.session.world_size // (self._sequences.size * self._layers.size)
        return (world, 1) if self.options.zero_stage == 0 and self._layers.size == 1 else (1, world)

    @property
    def shared_degrees(self) -> Mapping[str, int]:
        """Sequence-parallel ("sp", ``sequence_parallel_size``) and tensor-parallel size ("tp", ``autotp_size``)."""
        return {"sp": self._sequences.size, "tp": self._layers.size}

    @property
    def rng_seed_rank(self) -> int:
        """First rank of this rank's tensor-parallel group."""
        return self._layers.first

    @property
    def sequence_group(self) -> "ProcessGroup | None":
        """Sequence-parallel group of this rank.

        Collective on the first read: every rank of the group must call this.
        """
        if self._sequences.size > 1:
            self._open_communication()
        return self._sequences.group

    def sequence_attention(self, attention: Attention) -> Attention:
        """Wraps an attention function in DeepSpeed's ``DistributedAttention``.

        Collective: every rank of the group must call this.
        """
        group = self.sequence_group
        return attention if group is None else SequenceAttention(attention, group)

    @property
    def mesh(self) -> "DeviceMesh | None":
        """One-dimensional mesh of all ranks, over which states are sharded; None for one rank.

        Collective on the first read: every rank of the group must call this.
        """
        if self._mesh is None and self.run.session.world_size > 1:
            from torch.distributed.device_mesh import init_device_mesh

            self._mesh = init_device_mesh(
                self.run.session.device.type, (self.run.session.world_size,), mesh_dim_names=("zero",)
            )
        return self._mesh

    def forget_mesh(self) -> None:
        """Drops the mesh, so that the next read makes another."""
        self._mesh = None

"""Distribution of a model and of samples over ranks under DeepSpeed."""

from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING

from accel_backends.core.layout_methods import Attention, BackendSpread
from accel_deepspeed.tensor_parallel.autotp import Layers
from accel_deepspeed.ulysses.sequence import SequenceAttention, Sequences

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from accel_deepspeed.config.plugin import DeepSpeedConfig


class ZeroSpread(BackendSpread):
    """How the backend spreads them: ZeRO over all ranks, and sequences or layers over neighbours."""

    _options: "DeepSpeedConfig"
    _sequences: Sequences
    _layers: Layers
    _mesh: "DeviceMesh | None"

    @abstractmethod
    def _open_communication(self) -> None:
        """Gives DeepSpeed the process group."""

    @property
    def degrees(self) -> tuple[int, int]:
        """One replica over all ranks from stage 1 on, or where layers are shared; those that share anything are one."""
        world = self.session.world_size // (self._sequences.size * self._layers.size)
        return (world, 1) if self._options.zero_stage == 0 and self._layers.size == 1 else (1, world)

    @property
    def shared_degrees(self) -> Mapping[str, int]:
        """Sequences, with ``sequence_parallel_size``, and layers, with ``autotp_size``."""
        return {"sp": self._sequences.size, "tp": self._layers.size}

    @property
    def rng_seed_rank(self) -> int:
        """The first of those that share layers."""
        return self._layers.first

    @property
    def sequence_group(self) -> "ProcessGroup | None":
        """The neighbours that share this rank's sequences; collective when first read."""
        if self._sequences.size > 1:
            self._open_communication()
        return self._sequences.group

    def sequence_attention(self, attention: Attention) -> Attention:
        """Within DeepSpeed's ``DistributedAttention``; collective."""
        group = self.sequence_group
        return attention if group is None else SequenceAttention(attention, group)

    @property
    def mesh(self) -> "DeviceMesh | None":
        """All ranks in one dimension, over which states are handed out; None for one. Collective when first read."""
        if self._mesh is None and self.session.world_size > 1:
            from torch.distributed.device_mesh import init_device_mesh

            self._mesh = init_device_mesh(
                self.session.device.type, (self.session.world_size,), mesh_dim_names=("zero",)
            )
        return self._mesh

"""Gradients of models in ``FullyShardedDataParallel``."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, final

import torch
from torch import nn

from accel_backends.fsdp.mesh import ShardingMesh
from accel_backends.fsdp1.unreduced_gradients import drop_gradients, set_unreduced_gradients, unreduced_gradients
from accel_backends.ops.clip import Pieces
from accel_backends.ops.fqn import find_fsdp1
from accel_backends.roles.gradients import ReplicatedGradients
from accel_state.errors import BackendError

if TYPE_CHECKING:
    from accel_backends.core.backend import Backend


@final
class FlatGradients(ReplicatedGradients):
    """Gradients as views of flat slices over ``mesh``, averaged over all ranks; ``offloads``: the options offload."""

    def __init__(self, backend: "Backend", mesh: ShardingMesh, *, offloads: bool) -> None:
        super().__init__(backend, ranks=backend.session.world_size)
        self._sharding = mesh
        self._cpu_offload = offloads

    @property
    def pieces(self) -> Pieces | None:
        """Mesh and dimension over which flat gradients are sharded; None with shard degree 1."""
        mesh = self._sharding.mesh
        return None if self._sharding.degrees[1] == 1 else (mesh, (mesh.ndim - 1,))

    def unreduced(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """Returns unreduced gradients plus those reduced earlier in the window, as full tensors by FQN."""
        wrapped = find_fsdp1(model)
        return super().unreduced(model) if wrapped is None else unreduced_gradients(wrapped)

    def set_unreduced(self, model: nn.Module, gradients: Mapping[str, torch.Tensor]) -> None:
        """Reduces the given gradients at once; later backwards of the accumulation window add to the result.

        Raises:
            BackendError: parameters are offloaded from a device; torch cannot add their gradients to reduced ones.
        """
        wrapped = find_fsdp1(model)
        if wrapped is None:
            super().set_unreduced(model, gradients)
            return
        if self._offloads:
            raise BackendError(
                "this checkpoint was taken within an accumulation window, which cannot go on with cpu_offload=True of "
                "fsdp_version=1; nearest: fsdp_version=2, or cpu_offload=False"
            )
        set_unreduced_gradients(wrapped, gradients, group=self.run.session.group)

    def reduce(self, model: nn.Module) -> None:
        """Reduces the full gradients that torch keeps unreduced on each rank."""
        if self._offloads:  # torch cannot add to what ``set_unreduced`` would set
            super().reduce(model)
        else:
            self.set_unreduced(model, self.unreduced(model))

    def drop(self, model: nn.Module) -> None:
        """Drops gradients, those of flat parameters included."""
        wrapped = find_fsdp1(model)
        if wrapped is None:
            super().drop(model)
        else:
            drop_gradients(wrapped)

    @property
    def _offloads(self) -> bool:
        """Whether parameters are offloaded: with training on the CPU they are in host memory anyway."""
        return self._cpu_offload and self.run.session.device.type != "cpu"

"""Accumulated gradients of a stage 3 engine, partitioned from the first backward on."""

from collections.abc import Iterable, Mapping
from typing import Any, final

import torch
from torch import nn

from accel_deepspeed.zero.gather_order import Gathers
from accel_deepspeed.zero.gradients import Gradients
from accel_deepspeed.zero.reduction_order import ReductionOrder
from accel_state.errors import BackendError


@final
class ShardedGradients(Gradients):
    """Stage 3: every backward reduces, and this rank's partitions accumulate in one buffer."""

    def __init__(self, engine: Any) -> None:
        super().__init__(engine)
        each = [(parameter,) for group in self.optimizer.fp16_groups for parameter in group]
        self._gathers = Gathers(engine) if torch.distributed.get_world_size() > 1 else None
        self.order = ReductionOrder(
            self.optimizer, "reduce_ready_partitions_and_remove_grads", each, names=self.names, presence=self.presence
        )
        self._everywhere: torch.Tensor | None = None

    def absent(self) -> list[nn.Parameter]:
        """Returns the parameters without a gradient on any rank.

        Presence was all-reduced when all-gathers were compared.
        """
        return self.presence.absent(self._everywhere)

    def reduce(self) -> None:
        """Compares the all-gathers of ranks; with offloading, copies gradients to the optimizer's device.

        Gradients are reduced by every backward already.

        Raises:
            CollectiveMismatchError: ranks computed different modules.
        """
        if self._gathers is not None:
            self._everywhere = self._gathers.compare(self.presence.here())
        if self.optimizer.offload_optimizer:
            self.at_boundary(True)
            self.optimizer.finalize_gradient_accumulation_boundary()

    def reopen(self) -> None:
        """Copies changed gradients from the optimizer's device back to the buffer; does nothing without offloading."""
        if self.written and self.optimizer.offload_optimizer:
            held = self.optimizer._DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition
            for parameter, part in self.on_host():
                held[parameter.ds_id].narrow(0, 0, part.numel()).copy_(part)  # type: ignore[attr-defined]

    def shrink(self, factor: torch.Tensor) -> None:
        """With offloading also multiplies the buffer, from which gradients on disk are copied again."""
        super().shrink(factor)
        if self.optimizer.offload_optimizer:
            buffer = self.optimizer.grad_partitions_flat_buffer
            buffer.mul_(factor.to(buffer.device, buffer.dtype))

    def remove(self) -> None:
        """Restores the engine's own methods, those for all-gathers included."""
        super().remove()
        if self._gathers is not None:
            self._gathers.remove()

    def begin(self, parameter: nn.Parameter, gradient: torch.Tensor) -> None:
        """Copies this rank's slice into the buffer."""
        optimizer = self.optimizer
        held = optimizer._DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition[parameter.ds_id]  # type: ignore[attr-defined]
        start = held.numel() * optimizer._get_param_partition_rank(parameter)
        size = max(0, min(held.numel(), gradient.numel() - start))
        held.zero_()
        if size:
            held.narrow(0, 0, size).copy_(gradient.reshape(-1).narrow(0, start, size))
            optimizer._offload_boundary_param_ids.add(parameter.ds_id)  # type: ignore[attr-defined]

    def begun(self) -> None:
        """Makes the next backward add to the buffer."""
        optimizer = self.optimizer
        optimizer.micro_step_id = 0
        optimizer._epilogue_ran_this_backward = True
        if not optimizer.offload_optimizer:
            held = optimizer._DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition
            optimizer.averaged_gradients = {
                index: [held[parameter.ds_id] for parameter in group]
                for index, group in enumerate(optimizer.fp16_groups)
            }

    def in_place(self) -> list[torch.Tensor]:
        """Returns the buffer, or with offloading its copies on the optimizer's device."""
        if self.optimizer.offload_optimizer:
            return [part.grad for part in self.optimizer.fp32_partitioned_groups_flat if part.grad is not None]
        return [self.optimizer.grad_partitions_flat_buffer]

    def parts(self) -> dict[int, torch.Tensor]:
        """Returns this rank's slices, padded with zeros, from the buffer on the training device."""
        optimizer = self.optimizer
        held = optimizer._DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition
        return {id(parameter): held[parameter.ds_id] for group in optimizer.fp16_groups for parameter in group}

    def pieces(self, what: str) -> Mapping[int, torch.Tensor]:
        """Returns this rank's slices, with offloading those on the optimizer's device.

        Raises:
            BackendError: gradients are on disk, or the optimizer (Muon) has replaced them by its updates.
        """
        if self.optimizer.use_muon:
            self._refuse_updates(what)
        if not self.optimizer.offload_optimizer:
            return self.parts()
        if any(part.grad is None for part in self.optimizer.fp32_partitioned_groups_flat):
            raise BackendError(
                f"{what}: gradients have gone to the disk with the optimizer (nvme); nearest: clip_grad_norm_ of all "
                "parameters with norm_type=2, or offload_optimizer_device='cpu'"
            )
        return {id(parameter): part for parameter, part in self.on_host()}

    def on_host(self) -> Iterable[tuple[nn.Parameter, torch.Tensor]]:
        """Yields this rank's slices with offloading."""
        optimizer = self.optimizer
        for group in optimizer.fp16_groups if optimizer.offload_optimizer else ():
            for parameter in group:
                index, start, size = optimizer.grad_position[optimizer.get_param_id(parameter)]
                if (flat := optimizer.fp32_partitioned_groups_flat[index].grad) is not None:  # None: on a disk
                    yield parameter, flat.narrow(0, start, size)

    def pending(self) -> Iterable[torch.Tensor]:
        """Returns the buffer."""
        return [self.optimizer.grad_partitions_flat_buffer]

    def scaled_norm(self) -> Any:
        """Returns DeepSpeed's own norm, over the partitions of all ranks."""
        from deepspeed.runtime.utils import combine_grad_norm_groups

        norms = self.optimizer._get_norm_groups()
        self._done = self.optimizer, "_get_norm_groups", norms
        if len(norms) > 1:
            return combine_grad_norm_groups(norms)
        norm = torch.as_tensor(norms[0])
        return torch.where(norm >= 0, norm, torch.inf)  # -1 means that it is not finite

    def discard(self) -> None:
        """Clears the buffer, and makes the next backward overwrite it."""
        self.optimizer.zero_grad(set_to_none=True)
        if self.optimizer.offload_optimizer:
            self.optimizer.reset_cpu_buffers()
            self.optimizer._offload_boundary_param_ids = set()
        else:
            self.optimizer.averaged_gradients = {}
        self.optimizer.grad_partitions_flat_buffer.zero_()
        self.stepped()

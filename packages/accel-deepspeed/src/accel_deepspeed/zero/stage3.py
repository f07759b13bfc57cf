"""Accumulated gradients of a stage 3 engine, partitioned from the first backward on."""

from collections.abc import Iterable, Mapping
from typing import Any, final

import torch
from torch import nn

from accel_deepspeed.zero.arrivals import Arrivals
from accel_deepspeed.zero.gradients import Gradients
from accel_deepspeed.zero.partitions import Partitions
from accel_deepspeed.zero.stage12 import refuse_reopening
from accel_state.errors import BackendError


@final
class ShardedGradients(Gradients):
    """Stage 3: every backward reduces, and this rank's partitions accumulate in one buffer."""

    def __init__(self, engine: Any, layout: Partitions | None) -> None:
        super().__init__(engine, layout)
        self.arrivals = Arrivals(engine.module, engine.device)

    def reduce(self) -> None:
        """With offloading, copies gradients to the optimizer's device; every backward has reduced already."""
        optimizer = self.optimizer
        self.at_boundary(True)
        if optimizer.offload_optimizer:
            for flat in optimizer.fp32_partitioned_groups_flat:
                if flat.grad is not None:
                    flat.grad.zero_()  # DeepSpeed leaves what it does not write
            optimizer.finalize_gradient_accumulation_boundary()
        elif not self.ran:
            optimizer.overlapping_partition_gradients_reduce_epilogue()

    def reopen(self) -> None:
        """Does nothing: later backwards add to the buffer.

        Raises:
            BackendError: gradients have been changed on the optimizer's device, where the buffer is not.
        """
        if self.written and self.optimizer.offload_optimizer:
            refuse_reopening()

    def in_place(self) -> list[torch.Tensor]:
        """Returns the buffer, or with offloading its copies on the optimizer's device."""
        if self.optimizer.offload_optimizer:
            return [part.grad for part in self.optimizer.fp32_partitioned_groups_flat if part.grad is not None]
        return [self.optimizer.grad_partitions_flat_buffer]

    def parts(self) -> dict[int, torch.Tensor]:
        """Returns this rank's slices, padded with zeros, from the buffer on the training device."""
        found: dict[int, torch.Tensor] = {}
        offset = 0
        for parameter in (one for group in self.optimizer.fp16_groups for one in group):
            size = parameter.partition_numel()
            found[id(parameter)] = self.optimizer.grad_partitions_flat_buffer.narrow(0, offset, size)
            offset += size
        return found

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

        optimizer = self.optimizer
        norms = [
            optimizer.complete_grad_norm_calculation_for_cpu_offload(group)
            if optimizer.offload_optimizer
            else optimizer.get_grad_norm_direct(optimizer.averaged_gradients[index], group)
            for index, group in enumerate(optimizer.fp16_groups)
        ]
        norm = torch.as_tensor(combine_grad_norm_groups(norms))
        return torch.where(norm >= 0, norm, torch.inf)  # -1 means that it is not finite

    def discard(self) -> None:
        """Drops all accumulated gradients."""
        self.optimizer.zero_grad(set_to_none=True)
        if self.optimizer.offload_optimizer:
            self.optimizer.reset_cpu_buffers()
        self.stepped()

    def stepped(self) -> None:
        """Also clears the buffer, in which a parameter without later gradients would keep its own."""
        super().stepped()
        self.optimizer.grad_partitions_flat_buffer.zero_()

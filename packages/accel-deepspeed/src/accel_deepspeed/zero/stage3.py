"""Accumulated gradients of a stage 3 engine, partitioned from the first backward on."""

from collections.abc import Iterable
from typing import Any, final

import torch
from torch import nn

from accel_deepspeed.zero.gather_order import Gathers
from accel_deepspeed.zero.gradients import Factor, Gradients, multiply
from accel_deepspeed.zero.partitions import Partitions
from accel_deepspeed.zero.reduction_order import ReductionOrder

# The methods by which a step measures the norm of a group, in host memory and on the device.
_ON_HOST, _HERE = "complete_grad_norm_calculation_for_cpu_offload", "get_grad_norm_direct"


@final
class ShardedGradients(Gradients):
    """Stage 3: every backward reduces, and this rank's partitions accumulate in one buffer."""

    def __init__(self, engine: Any, partitions: Partitions | None) -> None:
        super().__init__(engine, partitions)
        self.offload = bool(self.optimizer.offload_optimizer)
        each = [(parameter,) for group in self.optimizer.fp16_groups for parameter in group]
        self._gathers = Gathers(engine) if torch.distributed.get_world_size() > 1 else None
        self.order = ReductionOrder(
            self.optimizer, "reduce_ready_partitions_and_remove_grads", each, names=self.names, presence=self.presence
        )

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
        if self.offload:
            self.at_boundary(True)
            self.optimizer.finalize_gradient_accumulation_boundary()

    def reopen(self) -> None:
        """Copies changed gradients from the optimizer's device back to the buffer; does nothing without offloading."""
        here = self.parts() if self.written and self.offload else {}
        for parameter, part in self.on_host() if here else ():
            here[id(parameter)].narrow(0, 0, part.numel()).copy_(part)

    def shrink(self, factor: Factor) -> None:
        """With offloading also multiplies the buffer, from which gradients on disk are copied again."""
        super().shrink(factor)
        if self.offload:
            multiply([self.optimizer.grad_partitions_flat_buffer], factor)

    def remove(self) -> None:
        super().remove()
        if self._gathers is not None:
            self._gathers.remove()

    def begin(self, parameter: nn.Parameter, gradient: torch.Tensor) -> None:
        """Copies this rank's slice into the buffer, which is empty."""
        assert self._partitions is not None
        part = self._partitions.part(parameter)
        if part.size:
            self.at_boundary(False)
            self.optimizer.partition_grads([parameter], [gradient.reshape(-1).narrow(0, part.start, part.size)])

    def begun(self) -> None:
        """Makes the next backward add to the buffer."""
        self.optimizer.micro_step_id = 0
        self.optimizer.independent_gradient_partition_epilogue()

    def on_device(self) -> list[torch.Tensor]:
        return [self.optimizer.grad_partitions_flat_buffer]

    def parts(self) -> dict[int, torch.Tensor]:
        """Returns this rank's slices, padded with zeros, from the buffer on the training device."""
        each = [parameter for group in self.optimizer.fp16_groups for parameter in group]
        slices = self.optimizer.grad_partitions_flat_buffer.split([one.partition_numel() for one in each])
        return dict(zip(map(id, each), slices, strict=True))

    def pending(self) -> Iterable[torch.Tensor]:
        return [self.optimizer.grad_partitions_flat_buffer]

    def scaled_norm(self) -> Any:
        """Returns DeepSpeed's own norm, over the partitions of all ranks; the step reuses the norms of its groups."""
        from deepspeed.runtime.utils import combine_grad_norm_groups

        optimizer = self.optimizer
        if self.offload:
            name, norms = _ON_HOST, [getattr(optimizer, _ON_HOST)(group) for group in optimizer.fp16_groups]
        else:
            measure, held = getattr(optimizer, _HERE), optimizer.averaged_gradients
            name, norms = _HERE, [measure(held[index], group) for index, group in enumerate(optimizer.fp16_groups)]
        again = iter(norms)
        # A step multiplies the norms of Muon's updates by the loss scale.
        reuse = self.loss_scale == 1.0 or not optimizer.use_muon
        self._done = (optimizer, name, lambda *_: next(again)) if reuse else None
        if len(norms) > 1:
            return combine_grad_norm_groups(norms)
        norm = torch.as_tensor(norms[0])
        return torch.where(norm >= 0, norm, torch.inf)  # -1 means that it is not finite

    def discard(self) -> None:
        """Clears the buffer, and makes the next backward overwrite it."""
        self.optimizer.zero_grad(set_to_none=True)
        if self.offload:
            self.optimizer.reset_cpu_buffers()
        else:
            self.optimizer.averaged_gradients = {}
        self.optimizer.grad_partitions_flat_buffer.zero_()
        self.stepped()

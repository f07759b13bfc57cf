"""Accumulated gradients of a stage 1 or 2 engine, partitioned as the optimizer updates them."""

from collections.abc import Iterable
from typing import Any, final

import torch
from torch import nn

from accel_backends.private import norms_of
from accel_deepspeed.private import partition_slice
from accel_deepspeed.zero.gradients import Gradients
from accel_deepspeed.zero.partitions import PartitionedParts, Partitions
from accel_deepspeed.zero.reduction_order import ReductionOrder


@final
class PartitionedGradients(Gradients):
    """Stages 1 and 2: each rank gets the partition of the gradients that its optimizer updates.

    At stage 1 parameters hold full gradients until the reduction; at stage 2 every backward reduces, and partitions
    accumulate. The next reduction replaces settled gradients, unless they accumulate in a buffer of their own dtype or
    in host memory. Settled gradients are therefore kept aside when more is added to them.
    """

    _partitions: PartitionedParts

    def __init__(self, engine: Any, partitions: Partitions | None) -> None:
        super().__init__(engine, partitions)
        self.partitions = bool(self.optimizer.partition_gradients)
        self.offload = bool(self.optimizer.cpu_offload)
        self._aside: list[torch.Tensor] | None = None
        self._begun: dict[int, dict[int, torch.Tensor]] = {}
        self._trained = [one for group in self.optimizer.bit16_groups for one in group]
        if not self.partitions:  # no backward reduces, so none has to be marked as not the last of a window
            engine.enable_backward_allreduce = False
            engine.set_gradient_accumulation_boundary(True)
        else:
            each = [(one, index) for index, group in enumerate(self.optimizer.bit16_groups) for one in group]
            self.order = ReductionOrder(
                self.optimizer, "process_gradients", each, names=self.names, presence=self.presence
            )

    def at_boundary(self, boundary: bool) -> None:
        """Sets the boundary in the engine at stage 2, where backwards reduce."""
        if self.partitions:
            super().at_boundary(boundary)

    def reduce(self) -> None:
        """Reduces (stage 1), or collects the partitions that every backward has reduced (stage 2)."""
        self.at_boundary(True)
        if self.partitions:
            self.optimizer.finalize_gradient_accumulation_boundary()
        else:
            self.optimizer.setup_buckets()  # no backward has, after loading a checkpoint within a window
            if self.offload:
                self.optimizer.accumulated_grads_in_cpu.clear()
            held = self.optimizer.get_gradient_for_reduction
            self.presence.add(one for one in self._trained if held(one) is not None)
            if torch.distributed.get_world_size(self.optimizer.dp_process_group) > 1:
                self._fill_missing()
            self.engine.allreduce_gradients()
        if self._aside is not None:
            for tensor, before in zip(self.in_place(), self._aside, strict=True):
                tensor.add_(before)
            self._aside = None
            self.measure()

    def _fill_missing(self) -> None:
        """Sets zeros for parameters without a gradient, so that all ranks reduce the same parameters."""
        for parameter in self._trained:
            if parameter.requires_grad and self.optimizer.get_gradient_for_reduction(parameter) is None:
                self._set(parameter, torch.zeros_like(parameter, dtype=self.optimizer.gradient_accumulation_dtype))

    def reopen(self) -> None:
        """Keeps settled gradients aside if the next reduction would replace them."""
        if self._accumulates():
            if self.offload and self.written:
                self._write_back()
            return
        self._aside = [tensor.clone() for tensor in self.in_place()]
        for index in list(self.optimizer.averaged_gradients):
            self.optimizer.averaged_gradients[index] = None

    def _write_back(self) -> None:
        """Copies changed settled gradients back to the buffers to which later backwards add."""
        optimizer = self.optimizer
        for parameter, values in self.on_host():
            part, index = self._partitions.part(parameter), self._partitions.group_of(parameter)
            if self._has_buffer(index):
                buffer, start = optimizer.averaged_gradients[index].flat_partition, part.offset
            else:
                buffer, start = optimizer.accumulated_grads_in_cpu[optimizer.get_param_id(parameter)], part.start
            buffer.view(-1).narrow(0, start, part.size).copy_(values)

    def pending(self) -> Iterable[torch.Tensor]:
        """Returns the gradients kept aside, and those accumulated since."""
        optimizer = self.optimizer
        found = list(self._aside or ())
        if not self.partitions:
            held = map(optimizer.get_gradient_for_reduction, self._trained)
            found += [tensor for tensor in held if tensor is not None]
        elif self.offload:
            found += optimizer.accumulated_grads_in_cpu.values()
        else:
            for tensors in optimizer.all_grad_tensors.values():
                found += tensors or ()
        for index, group in optimizer.averaged_gradients.items():
            if group is not None and self._has_buffer(index):
                found.append(group.flat_partition)
        return found

    def begin(self, parameter: nn.Parameter, gradient: torch.Tensor) -> None:
        """Stores the gradient where a backward leaves it: in the parameter (stage 1), or in this rank's partition."""
        optimizer, key = self.optimizer, self.optimizer.get_param_id(parameter)
        if not self.partitions:
            self._set(parameter, gradient)
            return
        if not optimizer.is_param_in_current_partition[key]:
            return
        index = self._partitions.group_of(parameter)
        if self._has_buffer(index):
            part = self._partitions.part(parameter)
            here = partition_slice(optimizer, index, key, self._partitions.ranks[index], part.size)
            here.copy_(gradient.view(-1).narrow(0, part.start, part.size))
        elif not self.offload:
            self._begun.setdefault(index, {})[key] = gradient.to(optimizer.gradient_accumulation_dtype)
        if self.offload:
            # DeepSpeed records in either case that the parameter has a gradient, which a step without this record
            # would leave out; it reads the full gradient only if the group has no buffer.
            self.at_boundary(False)
            self._set(parameter, gradient)
            optimizer.copy_grads_in_partition(parameter, index)
            optimizer.clear_grad_attribute(parameter)

    def _set(self, parameter: nn.Parameter, gradient: torch.Tensor) -> None:
        """Sets the attribute of a parameter from which DeepSpeed reduces its gradient."""
        if self.optimizer.use_grad_accum_attribute:
            parameter.grad_accum = gradient  # type: ignore[attr-defined]
        else:
            parameter.grad = gradient.to(parameter.dtype)

    def _has_buffer(self, index: int) -> bool:
        """Whether a group's partition accumulates in one buffer: in fp32 beside a model in 16 bits, without Muon."""
        optimizer = self.optimizer
        wider = torch.float32 == optimizer.gradient_accumulation_dtype != optimizer.dtype
        return wider and not any(map(self.is_updated, optimizer.params_in_partition[index][:1]))

    def begun(self) -> None:
        """Makes the stored gradients count as a micro-batch."""
        optimizer = self.optimizer
        if self.partitions:
            optimizer.micro_step_id = 0
        for index, found in self._begun.items():
            keys = [optimizer.get_param_id(parameter) for parameter in optimizer.params_in_partition[index]]
            optimizer.all_grad_tensors[index] = [found[key] for key in keys]
        self._begun.clear()

    def scaled_norm(self) -> Any:
        """Returns the norm over the partitions of all ranks, which the step reuses instead of measuring again.

        Uses DeepSpeed's own function if not every element counts once, or if gradients are in host memory. That
        function takes a dozen operations for each parameter, which costs more than the rest of a step's bookkeeping.
        """
        norm = self._norm_of_parts() if self._alike else self.optimizer.scaled_global_norm()
        self._done = self.optimizer, "scaled_global_norm", lambda: norm
        return norm

    @property
    def _alike(self) -> bool:
        """Whether each element of the partitions counts once: no experts, no tensor parallelism, no updates instead."""
        optimizer = self.optimizer
        unlike = self.offload or optimizer.has_moe_layers or optimizer.groups_lacking_loss_scale
        return not unlike and optimizer.model_parallel_world_size == 1

    def absent(self) -> list[nn.Parameter]:
        """Returns the parameters without a gradient on any rank; presence is all-reduced together with the norm."""
        if not (self._alike and self.optimizer.compute_grad_norm):
            return super().absent()
        if self._done is None:
            self.scaled_norm()
        return self.presence.absent(self._everywhere)

    def _norm_of_parts(self) -> torch.Tensor:
        from deepspeed.runtime.zero.utils import get_norm_dtype

        norms = norms_of(self.in_place(), 2, get_norm_dtype())
        square = torch.stack(norms).square_().sum().float()
        if torch.distributed.get_world_size(self.optimizer.dp_process_group) > 1:
            both = torch.cat([square.view(1), self.presence.here()])
            torch.distributed.all_reduce(both, group=self.optimizer.dp_process_group)
            square, self._everywhere = both[0], both[1:]
        return square.sqrt_().nan_to_num_(torch.inf, torch.inf)

    def discard(self) -> None:
        """Drops gradients in the same way as DeepSpeed does after an overflow."""
        optimizer = self.optimizer
        optimizer.zero_grad(set_to_none=True)
        optimizer.clear_backward_seen_flag()
        optimizer.ready_for_gradients = False  # the next backward makes its buckets anew
        if optimizer.contiguous_gradients:
            for bucket in optimizer.ipg_buckets.values():
                bucket.buffer.clear()
        optimizer.grads_in_partition, optimizer.grads_in_partition_offset = None, 0
        optimizer.micro_step_id = -1
        for index in list(optimizer.averaged_gradients):
            optimizer.averaged_gradients[index] = None
        for index in list(optimizer.all_grad_tensors):
            optimizer.all_grad_tensors[index] = None
        if self.offload:
            optimizer.reset_cpu_buffers()
        self._aside = None
        self.stepped()

    def stepped(self) -> None:
        super().stepped()
        self._aside = None

    def _accumulates(self) -> bool:
        """Whether later reductions add to settled gradients instead of replacing them."""
        buffers = all(map(self._has_buffer, range(len(self.optimizer.bit16_groups))))
        return buffers or (self.partitions and self.offload)

    def on_device(self) -> list[torch.Tensor]:
        return [tensor for group in self.optimizer.averaged_gradients.values() for tensor in group]

    def parts(self) -> dict[int, torch.Tensor]:
        """Returns the slices of parameters in this rank's partition.

        A neighbouring rank may have the rest of a parameter.
        """
        if self.offload:
            return {id(parameter): part for parameter, part in self.on_host()}
        found: dict[int, torch.Tensor] = {}
        for index, tensors in self.optimizer.averaged_gradients.items():
            held = self.optimizer.params_in_partition[index]
            starts = {self._partitions.part(one).offset: id(one) for one in held if one.numel()}
            place = 0
            for tensor in tensors or ():  # of a parameter, or padding before, between or after them
                if place in starts:
                    found[starts[place]] = tensor
                place += tensor.numel()
        return found

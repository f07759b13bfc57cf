"""Accumulated gradients of a stage 1 or 2 engine, partitioned as the optimizer updates them."""

from collections.abc import Iterable, Mapping
from typing import Any, cast, final

import torch
from torch import nn

from accel_deepspeed.zero.gradients import Gradients
from accel_deepspeed.zero.reduction_order import ReductionOrder, fill


@final
class PartitionedGradients(Gradients):
    """Stages 1 and 2: each rank gets the partition of the gradients that its optimizer updates.

    At stage 1 parameters hold full gradients until the reduction; at stage 2 every backward reduces, and partitions
    accumulate. The next reduction replaces settled gradients, unless they accumulate in a buffer of their own dtype or
    in host memory. Settled gradients are therefore kept aside when more is added to them.
    """

    def __init__(self, engine: Any) -> None:
        super().__init__(engine)
        self.partitions = bool(self.optimizer.partition_gradients)
        self.offload = bool(self.optimizer.cpu_offload)
        self._aside: list[torch.Tensor] | None = None
        self._begun: dict[int, dict[int, torch.Tensor]] = {}
        self._everywhere: torch.Tensor | None = None
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
            self._note_present()
            if torch.distributed.get_world_size(self.optimizer.dp_process_group) > 1:
                self._fill_missing()
            self.engine.allreduce_gradients()
        if self._aside is not None:
            for tensor, before in zip(self.in_place(), self._aside, strict=True):
                tensor.add_(before)
            self._aside = None
            self.measure()

    def _note_present(self) -> None:
        of = self.optimizer.get_gradient_for_reduction
        self.presence.add(one for group in self.optimizer.bit16_groups for one in group if of(one) is not None)

    def _fill_missing(self) -> None:
        """Sets zeros for parameters without a gradient, so that all ranks reduce the same parameters."""
        for group in self.optimizer.bit16_groups:
            for parameter in group:
                if parameter.requires_grad and self.optimizer.get_gradient_for_reduction(parameter) is None:
                    fill(parameter)
                    if self.optimizer.use_grad_accum_attribute:
                        self.optimizer._fill_param_grad_accum_attribute(parameter)

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
        """Copies changed settled gradients back to the accumulation buffers in host memory."""
        for parameter, part in self.on_host():
            key = self.optimizer.get_param_id(parameter)
            _, start, _, size = self.optimizer.grad_position[key]
            self.optimizer.accumulated_grads_in_cpu[key].view(-1).narrow(0, int(start), int(size)).copy_(part)

    def pending(self) -> Iterable[torch.Tensor]:
        """Returns the gradients kept aside, and those accumulated since."""
        optimizer = self.optimizer
        found = list(self._aside or ())
        if not self.partitions:
            for group in optimizer.bit16_groups:
                held = [optimizer.get_gradient_for_reduction(parameter) for parameter in group]
                found += [tensor for tensor in held if tensor is not None]
        elif self.offload:
            found += optimizer.accumulated_grads_in_cpu.values()
        else:
            for held in optimizer.all_grad_tensors.values():
                found += held or ()
        for index, group in optimizer.averaged_gradients.items():
            if group is not None and optimizer._use_compact_grad_partition_buffer(index):
                found.append(group.flat_partition)
        return found

    def begin(self, parameter: nn.Parameter, gradient: torch.Tensor) -> None:
        """Stores the gradient where a backward leaves it: in the parameter (stage 1), or in this rank's partition."""
        optimizer = self.optimizer
        if not self.partitions:
            if optimizer.use_grad_accum_attribute:
                parameter.grad_accum = gradient  # type: ignore[attr-defined]
            else:
                parameter.grad = gradient.to(parameter.dtype)
            return
        key = optimizer.get_param_id(parameter)
        if not optimizer.is_param_in_current_partition[key]:
            return
        index = optimizer._get_param_group_idx(parameter)
        if optimizer._use_compact_grad_partition_buffer(index):
            rank = torch.distributed.get_rank(group=optimizer.real_dp_process_group[index])
            start = int(optimizer.grad_start_offset[index][rank][key])
            there = int(optimizer.grad_partition_insertion_offset[index][rank][key])
            size = int(min(gradient.numel() - start, optimizer.partition_size[index] - there))
            part = optimizer._get_compact_grad_partition_slice(index, rank, key, size)
            part.copy_(gradient.view(-1).narrow(0, start, size))
        elif self.offload:
            optimizer.accumulated_grads_in_cpu[key] = gradient.view(-1).to(optimizer.device, parameter.dtype)
        else:
            self._begun.setdefault(index, {})[key] = gradient.to(optimizer.gradient_accumulation_dtype)
        if self.offload:
            optimizer._offload_accumulated_param_ids.add(key)

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
        self._done = self.optimizer, "scaled_global_norm", norm
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

        norms = torch._foreach_norm(self.in_place(), 2, dtype=get_norm_dtype())
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
        optimizer._release_ipg_buffers()
        optimizer._epilogue_ran_this_backward = False
        optimizer.micro_step_id = -1
        for index in list(optimizer.averaged_gradients):
            optimizer.averaged_gradients[index] = None
        for index in list(optimizer.all_grad_tensors):
            optimizer.all_grad_tensors[index] = None
        if self.offload:
            optimizer.reset_cpu_buffers()
            optimizer._offload_accumulated_param_ids = set()
        self._aside = None
        self.stepped()

    def stepped(self) -> None:
        """Also drops the gradients kept aside."""
        super().stepped()
        self._aside = None

    def _accumulates(self) -> bool:
        """Whether later reductions add to settled gradients instead of replacing them."""
        compact = all(map(self.optimizer._use_compact_grad_partition_buffer, range(len(self.optimizer.bit16_groups))))
        return compact or (self.partitions and self.offload)

    def in_place(self) -> list[torch.Tensor]:
        """Returns this rank's partition."""
        if self.offload:
            return [cast(torch.Tensor, part.grad) for part in self.optimizer.single_partition_of_fp32_groups]
        return [tensor for group in self.optimizer.averaged_gradients.values() for tensor in group]

    def parts(self) -> dict[int, torch.Tensor]:
        """Returns the slices of parameters in this rank's partition.

        A neighbouring rank may have the rest of a parameter.
        """
        if self.offload:
            return {id(parameter): part for parameter, part in self.on_host()}
        found: dict[int, torch.Tensor] = {}
        for index, tensors in self.optimizer.averaged_gradients.items():
            pieces = [one for one in tensors or () if not getattr(one, "_zero_padding", False)]
            found |= zip(map(id, self.optimizer.params_in_partition[index]), pieces, strict=False)
        return found

    def pieces(self, what: str) -> Mapping[int, torch.Tensor]:
        """Returns ``parts``.

        Raises:
            BackendError: an optimizer (Muon) whose partitions already hold its updates.
        """
        muon = "muon" in type(self.engine.basic_optimizer).__name__.lower()
        if muon and any(getattr(one, "use_muon", False) for one in self.parameters.values()):  # the same on all ranks
            self._refuse_updates(what)
        return self.parts()

    def on_host(self) -> Iterable[tuple[nn.Parameter, torch.Tensor]]:
        """Yields this rank's slices with offloading."""
        optimizer = self.optimizer
        for group in optimizer.params_in_partition if self.offload else ():
            for parameter in group:
                key = optimizer.get_param_id(parameter)
                index, _, start, size = optimizer.grad_position[key]
                yield parameter, optimizer.single_partition_of_fp32_groups[index].grad.view(-1).narrow(0, start, size)

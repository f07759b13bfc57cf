"""Accumulated gradients of a stage 1 or 2 engine, partitioned as the optimizer updates them."""

from collections.abc import Iterable, Mapping
from itertools import accumulate
from typing import Any, cast, final

import torch
from torch import nn

from accel_deepspeed.zero.arrivals import Arrivals
from accel_deepspeed.zero.gradients import Gradients, absent_everywhere
from accel_deepspeed.zero.partitions import Partitions
from accel_state.errors import BackendError


@final
class PartitionedGradients(Gradients):
    """Stages 1 and 2: each rank gets the partition of the gradients that its optimizer updates.

    At stage 1 parameters hold full gradients until the reduction; at stage 2 every backward reduces, and partitions
    accumulate. The next reduction replaces settled gradients, unless they accumulate in a buffer of their own dtype or
    in host memory. Settled gradients are therefore kept aside when more is added to them.
    """

    def __init__(self, engine: Any, layout: Partitions | None) -> None:
        super().__init__(engine, layout)
        self.partitions = bool(self.optimizer.partition_gradients)
        self.offload = bool(self.optimizer.cpu_offload)
        self._aside: list[torch.Tensor] | None = None
        self._absent: list[nn.Parameter] = []
        if self.partitions:
            self.arrivals = Arrivals(engine.module, engine.device)
        else:  # no backward reduces, so none has to be marked as not the last of a window
            engine.enable_backward_allreduce = False
            engine.set_gradient_accumulation_boundary(True)

    @property
    def filled(self) -> bool:
        """As of every stage; at stage 1 also gradients of a ``loss.backward()``, which parameters hold."""
        return super().filled or (not self.partitions and any(True for _ in self._present()))

    def at_boundary(self, boundary: bool) -> None:
        """Sets the boundary in the engine at stage 2, where backwards reduce."""
        if self.partitions:
            super().at_boundary(boundary)

    def reduce(self) -> None:
        """Reduces (stage 1), or collects the partitions that every backward has reduced (stage 2)."""
        optimizer = self.optimizer
        for flat in optimizer.single_partition_of_fp32_groups if self.offload else ():
            flat.grad.zero_()  # DeepSpeed leaves what it does not write
        self.at_boundary(True)
        if not self.ran:
            optimizer.setup_buckets()  # no backward has, in a window that was loaded
        if not self.partitions:
            if self.offload:
                optimizer.accumulated_grads_in_cpu.clear()
            self._absent = absent_everywhere(self, self._present())
            self._fill_missing()
            self.engine.allreduce_gradients()
        elif self.ran:
            optimizer.finalize_gradient_accumulation_boundary()
        else:
            optimizer.overlapping_partition_gradients_reduce_epilogue()
        if self._aside is not None:
            for tensor, before in zip(self.in_place(), self._aside, strict=True):
                tensor.add_(before)
            self._aside = None
            self.measure()

    def _present(self) -> Iterable[nn.Parameter]:
        """Yields the parameters that hold a gradient, at stage 1."""
        of = self.optimizer.get_gradient_for_reduction
        return (one for group in self.optimizer.bit16_groups for one in group if of(one) is not None)

    def _fill_missing(self) -> None:
        """Sets zeros for parameters without a gradient, so that all ranks reduce the same parameters."""
        optimizer = self.optimizer
        for parameter in (one for group in optimizer.bit16_groups for one in group):
            if optimizer.get_gradient_for_reduction(parameter) is None:
                if optimizer.use_grad_accum_attribute:
                    parameter.grad_accum = torch.zeros_like(parameter, dtype=optimizer.gradient_accumulation_dtype)
                else:
                    parameter.grad = torch.zeros_like(parameter)

    def absent(self) -> list[nn.Parameter]:
        """Returns the parameters without a gradient on any rank, after ``settle``."""
        return super().absent() if self.partitions else self._absent

    def reopen(self) -> None:
        """Keeps settled gradients aside if the next reduction would replace them.

        Raises:
            BackendError: they have been changed in host memory, where DeepSpeed accumulates in another tensor.
        """
        averaged = self.optimizer.averaged_gradients
        compact = all(_is_compact(averaged.get(index)) for index in range(len(self.optimizer.bit16_groups)))
        if compact or (self.partitions and self.offload):
            if self.offload and self.written:
                refuse_reopening()
            return
        self._aside = [tensor.clone() for tensor in self.in_place()]
        for index in list(averaged):
            averaged[index] = None

    def pending(self) -> Iterable[torch.Tensor]:
        """Returns the gradients kept aside, and those accumulated since."""
        optimizer = self.optimizer
        found = list(self._aside or ())
        if not self.partitions:
            found += [optimizer.get_gradient_for_reduction(parameter) for parameter in self._present()]
        elif self.offload:
            found += optimizer.accumulated_grads_in_cpu.values()
        else:
            for held in optimizer.all_grad_tensors.values():
                found += held or ()
        found += [group.flat_partition for group in optimizer.averaged_gradients.values() if _is_compact(group)]
        return found

    def scaled_norm(self) -> Any:
        """Returns DeepSpeed's own norm, over the partitions of all ranks."""
        norm = torch.as_tensor(self.optimizer.scaled_global_norm())
        return torch.where(norm >= 0, norm, torch.inf)  # -1 means that it is not finite

    def discard(self) -> None:
        """Clears the buffers in which gradients accumulate."""
        optimizer = self.optimizer
        for tensor in self.pending():
            tensor.zero_()
        optimizer.zero_grad(set_to_none=True)
        for index, group in optimizer.averaged_gradients.items():
            if not _is_compact(group):
                optimizer.averaged_gradients[index] = None
        if self.offload:
            optimizer.reset_cpu_buffers()
        self.stepped()

    def stepped(self) -> None:
        """Also drops the gradients kept aside, and those that a parameter without later ones would keep."""
        super().stepped()
        self._aside = None
        for tensor in self.optimizer.accumulated_grads_in_cpu.values() if self.offload else ():
            tensor.zero_()

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
        assert self.layout is not None
        found: dict[int, torch.Tensor] = {}
        for index, tensors in self.optimizer.averaged_gradients.items():
            starts = accumulate((one.numel() for one in tensors), initial=0)
            by_start = dict(zip(starts, tensors, strict=False))
            for parameter in self.optimizer.params_in_partition[index]:
                found[id(parameter)] = by_start[self.layout.part(parameter).offset]
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
        for group in self.optimizer.params_in_partition if self.offload else ():
            for parameter in group:
                assert self.layout is not None
                part = self.layout.part(parameter)
                assert part.flat is not None
                assert part.flat.grad is not None
                yield parameter, part.of(part.flat.grad)


def _is_compact(group: Any) -> bool:
    """Whether reductions add to the settled gradients of a group instead of replacing them."""
    return getattr(group, "flat_partition", None) is not None


def refuse_reopening() -> None:
    """Refuses to accumulate more after settled gradients in host memory have been changed.

    Raises:
        BackendError: always.
    """
    raise BackendError(
        "backward after gradients of this step were clipped or scaled, with the optimizer offloaded: DeepSpeed "
        "accumulates in another tensor than it steps with; clip after the last backward of the step, or leave "
        "offload_optimizer out"
    )

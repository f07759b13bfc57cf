"""The gradients that an engine has accumulated: reduced when they are wanted, measured, scaled and let go.

DeepSpeed reduces in the backward that it was told is the last of its window. Here no backward is: each adds to what
there is, and ``settle`` reduces when a norm or a step needs it. So a window may end where nobody knew, a micro-batch
may have several losses, and a weight may be put right before anything travels.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, cast, final

import torch
from torch import nn

from accel_state.errors import BackendError

Factor = float | torch.Tensor


class Gradients(ABC):
    """What one engine has accumulated since its last step.

    Attributes:
        engine: the engine.
        filled: whether there has been a backward since the last step.
        settled: whether what there is has been reduced and lies where the step takes it from.
    """

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.optimizer = engine.optimizer
        self.filled = False
        self.settled = False
        # A method of the optimizer and what it returned for what is settled: the step need not measure again.
        self._measured: tuple[str, Any] | None = None

    def backward(self, run: Callable[[], Any]) -> None:
        """Runs one backward, whose gradients add to what there is."""
        self._open()
        clear = getattr(self.optimizer, "clear_backward_seen_flag", None)
        if clear is not None:
            clear()  # without it stage 3 takes two backwards with no forward between them for one
        run()
        self.filled = True

    def settle(self) -> None:
        """Reduces what has been accumulated; collective.

        Raises:
            BackendError: there has been no backward.
        """
        if self.settled:
            return
        if not self.filled:
            raise BackendError("an optimizer step without gradients: no backward has run since the step before")
        self.reduce()
        self.settled = True

    def scale(self, factor: Factor) -> None:
        """Multiplies what there is."""
        self._open()
        for tensor in self.pending():
            tensor.mul_(factor.to(tensor.device, tensor.dtype) if isinstance(factor, torch.Tensor) else factor)

    def norm(self) -> torch.Tensor:
        """The norm over all ranks, the loss scale taken out; inf where it is not finite; collective."""
        self.settle()
        found = self.scaled_norm()
        norm = torch.as_tensor(found, dtype=torch.float32).detach().clone()
        norm = torch.where(norm >= 0, norm, torch.full_like(norm, float("inf")))
        return norm / float(getattr(self.optimizer, "loss_scale", 1.0))

    def clip(self, max_norm: float, norm: torch.Tensor) -> None:
        """Lets the next step clip to ``max_norm``; ``norm`` is what there is."""
        self.optimizer.clip_grad = max_norm

    def limit(self, value: float) -> None:
        """Limits each element, the loss scale taken into account."""
        self.settle()
        bound = value * float(getattr(self.optimizer, "loss_scale", 1.0))
        for tensor in self.in_place():
            tensor.clamp_(-bound, bound)
        self._measured = None
        self.measure()

    def step(self) -> bool:
        """Reduces what is left to reduce, and updates; False if the engine left the step out. Collective."""
        self.settle()
        configured = self.engine.gradient_clipping()
        measured = self._measured
        if measured is not None:
            setattr(self.optimizer, measured[0], lambda: measured[1])
        try:
            self._at_boundary(self.engine.step)
        finally:
            if measured is not None:
                delattr(self.optimizer, measured[0])
        if hasattr(self.optimizer, "clip_grad"):
            self.optimizer.clip_grad = configured
        self.stepped()
        return bool(self.engine.was_step_applied())

    def stepped(self) -> None:
        """The engine has stepped and let go of the gradients."""
        self.filled = self.settled = False
        self._measured = None

    def _open(self) -> None:
        """Lets more be added, or what there is be changed."""
        if self.settled:
            self.reopen()
            self.settled = False
        self._measured = None

    def held(self, parameters: Mapping[str, nn.Parameter]) -> dict[str, torch.Tensor]:
        """Whole gradients by name, of which the average over ranks is the gradient; collective. Default: reduced."""
        self.settle()
        return {name: self.whole(parameter) for name, parameter in parameters.items() if parameter.requires_grad}

    def hold(
        self, parameters: Mapping[str, nn.Parameter], shares: Mapping[str, torch.Tensor], brought: Collection[str]
    ) -> None:
        """Starts a window with the average of these shares; ``brought`` are the names that any rank has. Collective."""
        import torch.distributed as dist

        for name, parameter in parameters.items():
            if not parameter.requires_grad:
                continue
            shape = getattr(parameter, "ds_shape", parameter.shape)
            device, dtype = self.engine.device, self.dtype
            mine = shares.get(name)
            total = (
                torch.zeros(shape, device=device, dtype=dtype) if mine is None else mine.to(device, dtype, copy=True)
            )
            if name in brought and dist.get_world_size() > 1:
                dist.all_reduce(total)
            self.begin(parameter, total.div_(dist.get_world_size()))
        self.begun()
        self.filled = True

    @property
    def dtype(self) -> torch.dtype:
        """What gradients add up in."""
        found: torch.dtype = self.engine.get_data_types()[1]
        return found

    def measure(self) -> None:
        """Measures again what the optimizer measured while it reduced. Default: it measures when it steps."""

    def whole(self, parameter: nn.Parameter) -> torch.Tensor:
        """A settled gradient, whole on every rank; collective."""
        from deepspeed.utils import safe_get_full_grad

        found: torch.Tensor = safe_get_full_grad(parameter)
        return found.detach().clone()

    def begun(self) -> None:
        """All parameters have been given to ``begin``. Default: nothing is left to do."""

    @abstractmethod
    def begin(self, parameter: nn.Parameter, gradient: torch.Tensor) -> None:
        """Takes a whole gradient, the same on all ranks, as the first of a window."""

    @abstractmethod
    def in_place(self) -> list[torch.Tensor]:
        """The settled tensors, as the step takes them."""

    @abstractmethod
    def reduce(self) -> None:
        """Reduces and puts in place; collective."""

    @abstractmethod
    def reopen(self) -> None:
        """Lets more be added after ``reduce``."""

    @abstractmethod
    def pending(self) -> Iterable[torch.Tensor]:
        """The tensors that hold what is not settled."""

    @abstractmethod
    def scaled_norm(self) -> Any:
        """The norm of what is settled, times the loss scale; below 0 where it is not finite."""

    @abstractmethod
    def discard(self) -> None:
        """Lets go of everything accumulated."""

    def _at_boundary(self, act: Callable[[], Any]) -> None:
        self.engine.set_gradient_accumulation_boundary(True)
        try:
            act()
        finally:
            self.engine.set_gradient_accumulation_boundary(False)


@final
class WholeGradients(Gradients):
    """Stage 0: whole gradients in the parameters, averaged over ranks by one all-reduce.

    An average of averages and of what came later is the average of all, so nothing has to be done to reopen it.
    """

    def reduce(self) -> None:
        """One all-reduce for each dtype."""
        self._at_boundary(self.engine.allreduce_gradients)

    def reopen(self) -> None:
        """Nothing: what is averaged already is the same on all ranks."""

    def clip(self, max_norm: float, norm: torch.Tensor) -> None:
        """Scales the gradients at once, where there is no optimizer of DeepSpeed's to do it."""
        if hasattr(self.optimizer, "clip_grad"):
            super().clip(max_norm, norm)
            return
        factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        for tensor in self.pending():
            tensor.mul_(factor.to(tensor.dtype))

    def held(self, parameters: Mapping[str, nn.Parameter]) -> dict[str, torch.Tensor]:
        """The parameters' own: this rank's share until they are reduced, the average after."""
        return {name: p.grad.detach().clone() for name, p in parameters.items() if p.grad is not None}

    def begin(self, parameter: nn.Parameter, gradient: torch.Tensor) -> None:
        """The parameter holds it."""
        parameter.grad = gradient.to(parameter.dtype)

    def in_place(self) -> list[torch.Tensor]:
        """The parameters' own."""
        return list(self.pending())

    def pending(self) -> Iterable[torch.Tensor]:
        """The parameters' own."""
        return [p.grad for p in self.engine.module.parameters() if p.grad is not None]

    def scaled_norm(self) -> Any:
        """Of all gradients, which every rank holds."""
        tensors = [tensor.float() for tensor in self.pending()]
        norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(tensor) for tensor in tensors]))
        return torch.where(torch.isfinite(norm), norm, torch.full_like(norm, -1.0))

    def discard(self) -> None:
        """Clears the parameters' gradients."""
        for parameter in self.engine.module.parameters():
            parameter.grad = None
        self.stepped()


@final
class PartitionedGradients(Gradients):
    """Stages 1 and 2: each rank gets the part of the gradients that its optimizer updates.

    At stage 1 parameters hold whole gradients until they are reduced; at stage 2 every backward reduces, and parts add
    up. What is settled is replaced by the next reduction, unless it accumulates in a buffer of its own dtype or on the
    host; so it is kept aside when more is added to it.
    """

    def __init__(self, engine: Any) -> None:
        super().__init__(engine)
        self.partitions = bool(self.optimizer.partition_gradients)
        self.offload = bool(self.optimizer.cpu_offload)
        self._aside: list[torch.Tensor] | None = None
        self._begun: dict[int, dict[int, torch.Tensor]] = {}

    def reduce(self) -> None:
        """Reduces (stage 1) or gathers what every backward has reduced (stage 2)."""
        if self.partitions:
            self._at_boundary(self.optimizer.finalize_gradient_accumulation_boundary)
        else:
            if self.offload:
                self.optimizer.accumulated_grads_in_cpu.clear()
            self._at_boundary(self.engine.allreduce_gradients)
        if self._aside is not None:
            for tensor, before in zip(self.in_place(), self._aside, strict=True):
                tensor.add_(before)
            self._aside = None
            self.measure()

    def reopen(self) -> None:
        """Keeps aside what the next reduction would replace."""
        if self._accumulates():
            return
        self._aside = [tensor.clone() for tensor in self.in_place()]
        for index in list(self.optimizer.averaged_gradients):
            self.optimizer.averaged_gradients[index] = None

    def pending(self) -> Iterable[torch.Tensor]:
        """What is kept aside, and what has come since."""
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
        """Goes where a backward would have left it: with the parameter (stage 1), or in this rank's part."""
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
        """What there is counts as a micro-batch."""
        optimizer = self.optimizer
        if self.partitions:
            optimizer.micro_step_id = 0
        for index, found in self._begun.items():
            keys = [optimizer.get_param_id(parameter) for parameter in optimizer.params_in_partition[index]]
            optimizer.all_grad_tensors[index] = [found[key] for key in keys]
        self._begun.clear()

    def scaled_norm(self) -> Any:
        """DeepSpeed's own, over the parts of all ranks."""
        self._measured = "scaled_global_norm", self.optimizer.scaled_global_norm()
        return self._measured[1]

    def discard(self) -> None:
        """What DeepSpeed does with gradients that overflowed."""
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
        """The engine has stepped and let go of the gradients."""
        super().stepped()
        self._aside = None

    def _accumulates(self) -> bool:
        """Whether later reductions add to what is settled instead of replacing it."""
        compact = all(map(self.optimizer._use_compact_grad_partition_buffer, range(len(self.optimizer.bit16_groups))))
        return compact or (self.partitions and self.offload)

    def in_place(self) -> list[torch.Tensor]:
        """This rank's part."""
        if self.offload:
            return [cast(torch.Tensor, part.grad) for part in self.optimizer.single_partition_of_fp32_groups]
        return [tensor for group in self.optimizer.averaged_gradients.values() for tensor in group]

    def measure(self) -> None:
        """Measures again what DeepSpeed measures while it copies gradients to the host."""
        optimizer = self.optimizer
        if not self.offload:
            return
        for group in optimizer.params_in_partition:
            for parameter in group:
                key = optimizer.get_param_id(parameter)
                index, _, start, size = optimizer.grad_position[key]
                part = optimizer.single_partition_of_fp32_groups[index].grad.view(-1).narrow(0, start, size)
                optimizer.norm_for_param_grads[key] = torch.linalg.vector_norm(part)


def gradients_of(engine: Any) -> Gradients:
    """The accumulated gradients of an engine, by where its optimizer keeps them.

    Raises:
        BackendError: an optimizer that keeps them elsewhere.
    """
    optimizer = engine.optimizer
    if hasattr(optimizer, "grad_partitions_flat_buffer"):
        from accel_backends.deepspeed_sharded import ShardedGradients

        return ShardedGradients(engine)
    if hasattr(optimizer, "averaged_gradients"):
        return PartitionedGradients(engine)
    if engine.zero_optimization():
        raise BackendError(
            f"DeepSpeed's {type(optimizer).__name__} is not supported; it is used at stage 1 in bf16 with "
            "data_types.grad_accum_dtype fp32: leave that out, or use stage 2"
        )
    return WholeGradients(engine)

"""The gradients that an engine has accumulated: reduced when they are wanted, measured, scaled and let go.

DeepSpeed reduces in the backward that it was told is the last of its window. Here no backward is: each adds to what
there is, and ``settle`` reduces when a norm or a step needs it. So a window may end where nobody knew, a micro-batch
may have several losses, and a weight may be put right before anything travels.
"""

import sys
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, ClassVar, final

import torch
from torch import nn

from accel_backends.clip import listed
from accel_backends.deepspeed_by_hand import ByHand
from accel_backends.deepspeed_cuts import is_cut, local_shape_of, part_of_whole, shape_of, whole_of_cut
from accel_backends.deepspeed_order import ReductionOrder
from accel_backends.deepspeed_reads import Reads
from accel_backends.watching import Keep
from accel_state.errors import BackendError

Factor = float | torch.Tensor


class Gradients(ABC):
    """What one engine has accumulated since its last step.

    Attributes:
        engine: the engine.
        parameters: the model's, by id.
        names: of those, by id.
        filled: whether there has been a backward since the last step.
        settled: whether what there is has been reduced and lies where the step takes it from.
        running: a backward of the backend is running.
        order: in which order backwards reduce; None where none does.
        backwards: how many have begun.
        keeps: whether parameters hold gradients when these are settled.
    """

    keeps: ClassVar[bool] = False

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.optimizer = engine.optimizer
        self.filled = False
        self.settled = False
        self.running = False
        self._boundary: bool | None = None
        self.parameters: dict[int, nn.Parameter] = {id(one): one for one in engine.module.parameters()}
        self.names = {id(one): name for name, one in engine.module.named_parameters()}
        held = {id(one) for group in engine.basic_optimizer.param_groups for one in group["params"]}
        self._frozen = [one for one in self.parameters.values() if not one.requires_grad and id(one) not in held]
        # Whoever looks at each rank's parts just before a step.
        self.watchers: OrderedDict[int, Keep] = OrderedDict()
        # A method, of what, and what it gave for what is settled: the step need not call it again.
        self._done: tuple[Any, str, Any] | None = None
        self.order: ReductionOrder | None = None
        self._by_hand = ByHand(engine, lambda: self.running)
        self.backwards = 0
        self._reads = Reads(dict(engine.module.named_parameters()))
        self._shown = engine.register_forward_pre_hook(self._reads.show)  # torch.compile looks at classes

    def backward(self, run: Callable[[], Any]) -> None:
        """Runs one backward, whose gradients add to what there is."""
        self._reads.show()
        self.backwards += 1
        self._open()
        self.at_boundary(False)
        clear = getattr(self.optimizer, "clear_backward_seen_flag", None)
        if clear is not None:
            clear()  # without it stage 3 takes two backwards with no forward between them for one
        if self.order is not None:
            self.order.forget()
        self._by_hand.start()
        self.running = True
        try:
            run()
        finally:
            self.running = False
        self.filled = True
        if self.order is not None:
            self._reads.hide()

    def remove(self) -> None:
        """Gives the engine its own methods back."""
        self._reads.show()
        self._shown.remove()
        self._by_hand.remove()
        if self.order is not None:
            self.order.remove()

    def settle(self) -> None:
        """Reduces what has been accumulated; collective.

        Raises:
            BackendError: there has been no backward.
        """
        if self.settled:
            return
        if not self.filled:
            raise BackendError("an optimizer step without gradients: no backward has run since the step before")
        self._reads.show()
        self.reduce()
        self.settled = True
        if not self.keeps:
            self._reads.hide()

    def check_empty(self) -> None:
        """Refuses to pass over a step for which gradients have come in another way.

        Raises:
            BackendError: the engine's own ``backward`` was called, or one by hand.
        """
        if self._by_hand.own:
            raise BackendError(
                "the engine's own backward was called, whose gradients accelerator's step does not take; call "
                "accelerator.backward(loss), or the engine's own step, too"
            )
        self._check()

    def _check(self) -> None:
        """Refuses a step that would leave out gradients, or parameters, without a word.

        Raises:
            BackendError: see the messages.
        """
        thawed = [self.names[id(one)] for one in self._frozen if one.requires_grad]
        if thawed:
            raise BackendError(
                f"{listed(thawed, 3)}: frozen when the model was prepared, and trained since; a DeepSpeed engine steps "
                "the parameters that required gradients then; call requires_grad_(True) before prepare"
            )
        if self.order is not None:
            self.order.check()

    def scale(self, factor: Factor) -> None:
        """Multiplies what there is."""
        self._open()
        for tensor in self.pending():
            tensor.mul_(factor.to(tensor.device, tensor.dtype) if isinstance(factor, torch.Tensor) else factor)

    def norm(self) -> torch.Tensor:
        """The norm over all ranks, the loss scale taken out; inf where it is not finite; collective."""
        self.settle()
        norm = torch.as_tensor(self.scaled_norm(), dtype=torch.float32)
        return norm if self.loss_scale == 1.0 else norm / self.loss_scale

    def clip(self, max_norm: float, norm: torch.Tensor) -> None:
        """Lets the next step clip to ``max_norm``; ``norm`` is what there is."""
        self.optimizer.clip_grad = max_norm

    def limit(self, value: float) -> None:
        """Limits each element, the loss scale taken into account."""
        self.settle()
        bound = value * self.loss_scale
        for tensor in self.in_place():
            tensor.clamp_(-bound, bound)
        self._done = None
        self.measure()

    def step(self) -> bool:
        """Reduces what is left to reduce, and updates; False if the engine left the step out. Collective.

        Raises:
            BackendError: it would leave out gradients or parameters without a word.
        """
        self._reads.show()
        self._check()
        self.settle()
        self._reads.show()
        for keep in self.watchers.values():
            keep(self.parts())
        configured = self.engine.gradient_clipping()
        done = self._done
        if done is not None:
            setattr(done[0], done[1], lambda: done[2])
        self.at_boundary(True)
        try:
            self.engine.step()
        finally:
            if done is not None:
                delattr(done[0], done[1])
        if hasattr(self.optimizer, "clip_grad"):
            self.optimizer.clip_grad = configured
        self.stepped()
        return bool(self.engine.was_step_applied())

    def stepped(self) -> None:
        """The engine has stepped and let go of the gradients."""
        self._reads.show()
        self.filled = self.settled = False
        self._done = None

    def at_boundary(self, boundary: bool) -> None:
        """Whether what the engine does next is for the end of a window: a reduction or a step."""
        if boundary is not self._boundary:  # the engine takes as long to be told as for a small kernel
            self.engine.set_gradient_accumulation_boundary(boundary)
            self._boundary = boundary

    def _open(self) -> None:
        """Lets more be added, or what there is be changed."""
        if self.settled:
            self.reopen()
            self.settled = False
        self._done = None

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
            shape = shape_of(parameter)
            device, dtype = self.engine.device, self.dtype
            mine = shares.get(name)
            total = (
                torch.zeros(shape, device=device, dtype=dtype) if mine is None else mine.to(device, dtype, copy=True)
            )
            if name in brought and dist.get_world_size() > 1:
                dist.all_reduce(total)
            mine = part_of_whole(parameter, total.div_(dist.get_world_size()))
            self.begin(parameter, mine.view(local_shape_of(parameter)))
        self.begun()
        self.filled = True

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss as the engine's backward is to get it. Default: as it is, the engine scales it."""
        return loss

    @property
    def loss_scale(self) -> float:
        """The factor that gradients carry until the step."""
        return float(getattr(self.optimizer, "loss_scale", 1.0))

    @property
    def dtype(self) -> torch.dtype:
        """What gradients add up in."""
        found: torch.dtype = self.engine.get_data_types()[1]
        return found

    def measure(self) -> None:
        """Measures again what the optimizer measured while it copied gradients to the host."""
        for parameter, part in self.on_host():
            self.optimizer.norm_for_param_grads[self.optimizer.get_param_id(parameter)] = torch.linalg.vector_norm(part)

    def on_host(self) -> Iterable[tuple[nn.Parameter, torch.Tensor]]:
        """This rank's parts of gradients that were copied to the host, by parameter. Default: none were."""
        return ()

    def whole(self, parameter: nn.Parameter) -> torch.Tensor:
        """A settled gradient, whole on every rank; collective."""
        from deepspeed.utils import safe_get_full_grad

        found: torch.Tensor = safe_get_full_grad(parameter)
        return whole_of_cut(parameter, found.detach().clone())

    def begun(self) -> None:
        """All parameters have been given to ``begin``. Default: nothing is left to do."""

    @abstractmethod
    def begin(self, parameter: nn.Parameter, gradient: torch.Tensor) -> None:
        """Takes a gradient of all that the rank computes with, averaged over ranks, as the first of a window."""

    @abstractmethod
    def in_place(self) -> list[torch.Tensor]:
        """The settled tensors, as the step takes them."""

    @abstractmethod
    def parts(self) -> dict[int, torch.Tensor]:
        """What of each parameter's settled gradient this rank steps with, by the parameter's id."""

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
        """The norm of what is settled, times the loss scale; inf where it is not finite."""

    @abstractmethod
    def discard(self) -> None:
        """Lets go of everything accumulated."""


@final
class WholeGradients(Gradients):
    """Stage 0: whole gradients in the parameters, averaged over ranks by one all-reduce.

    An average of averages and of what came later is the average of all, so nothing has to be done to reopen it.
    """

    keeps: ClassVar[bool] = True

    def reduce(self) -> None:
        """One all-reduce for each dtype."""
        self.at_boundary(True)
        self.engine.allreduce_gradients()

    def reopen(self) -> None:
        """Nothing: what is averaged already is the same on all ranks."""

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """Times the loss scale of fp16, which the engine takes out of gradients and leaves to others to put in."""
        record = self._loss_scale
        return loss if record is None else loss.float() * record.cur_scale

    def step(self) -> bool:
        """The engine's step, after which the loss scale grows: it would grow between backward and its own division."""
        record = self._loss_scale
        if record is None or not record.dynamic_loss_scale:
            return super().step()
        window, record.scale_window = record.scale_window, sys.maxsize
        try:
            applied = super().step()
        finally:
            record.scale_window = window
        stable = record.cur_iter - record.last_overflow_iter - 2  # steps before this one
        if applied and stable > 0 and stable % window == 0:
            record.cur_scale *= record.scale_factor
        return applied

    @property
    def _loss_scale(self) -> Any:
        """DeepSpeed's record of the loss scale; None where nothing is scaled."""
        record = getattr(self.optimizer, "loss_scale_config", None)
        return record if record is not None and record.use_grad_scaling else None

    def clip(self, max_norm: float, norm: torch.Tensor) -> None:
        """Scales the gradients at once, where there is no optimizer of DeepSpeed's to do it."""
        if hasattr(self.optimizer, "clip_grad"):
            super().clip(max_norm, norm)
            return
        nn.utils.clip_grads_with_norm_(self.parameters.values(), max_norm, norm)
        self._done = self.engine, "clip_fp32_gradients", None

    def held(self, parameters: Mapping[str, nn.Parameter]) -> dict[str, torch.Tensor]:
        """The parameters' own: this rank's share until they are reduced, the average after."""
        return {name: whole_of_cut(p, p.grad.detach().clone()) for name, p in parameters.items() if p.grad is not None}

    def begin(self, parameter: nn.Parameter, gradient: torch.Tensor) -> None:
        """The parameter holds it."""
        parameter.grad = gradient.to(parameter.dtype)

    def in_place(self) -> list[torch.Tensor]:
        """The parameters' own."""
        return list(self.pending())

    def pending(self) -> Iterable[torch.Tensor]:
        """The parameters' own."""
        return [p.grad for p in self.parameters.values() if p.grad is not None]

    def parts(self) -> dict[int, torch.Tensor]:
        """The parameters' own."""
        return {key: one.grad for key, one in self.parameters.items() if one.grad is not None}

    def scaled_norm(self) -> Any:
        """Of all gradients, which every rank holds, or a part where ranks share layers."""
        return self._norm_of_all().nan_to_num_(torch.inf, torch.inf)

    def _norm_of_all(self) -> torch.Tensor:
        found = [one for one in self.parameters.values() if one.grad is not None]
        if self.engine.autotp_size() <= 1:
            return nn.utils.get_total_norm([one.grad.float() for one in found if one.grad is not None])
        import torch.distributed as dist
        from deepspeed.utils import groups

        group = groups.get_tensor_model_parallel_group()
        counted = [one for one in found if is_cut(one) or group.rank() == 0]
        norm = nn.utils.get_total_norm([one.grad.float() for one in counted if one.grad is not None])
        square = norm.to(self.engine.device).square()
        dist.all_reduce(square, group=group)
        return square.sqrt()

    def discard(self) -> None:
        """Clears the parameters' gradients."""
        for parameter in self.parameters.values():
            parameter.grad = None
        self.stepped()


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
        from accel_backends.deepspeed_partitioned import PartitionedGradients

        return PartitionedGradients(engine)
    if engine.zero_optimization():
        raise BackendError(
            f"DeepSpeed's {type(optimizer).__name__} is not supported; it is used at stage 1 in bf16 with "
            "data_types.grad_accum_dtype fp32: leave that out, or use stage 2"
        )
    return WholeGradients(engine)

"""The gradients that an engine has accumulated: reduced when they are needed, measured, scaled and dropped.

DeepSpeed reduces in the last backward of a window of fixed length. Here no backward is marked as the last: each adds to
what has been accumulated, and ``settle`` reduces when a norm or a step needs it. So a window may end after any
backward, a micro-batch may have several losses, and gradients may be weighted before they are reduced.
"""

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import nullcontext
from typing import Any, ClassVar

import torch
from torch import nn

from accel_backends.ops.clip import listed
from accel_backends.ops.gradient_observer import Keep
from accel_deepspeed.engine.manual_backward import ByHand
from accel_deepspeed.tensor_parallel.shards import full_of_shard, local_shape_of, shape_of, shard_of_full
from accel_deepspeed.zero.gradient_reads import Reads
from accel_deepspeed.zero.missing_gradients import LeftOut, Presence
from accel_deepspeed.zero.reduction_order import ReductionOrder
from accel_state.errors import BackendError

Factor = float | torch.Tensor


class Gradients(ABC):
    """What one engine has accumulated since its last step.

    Attributes:
        engine: the engine.
        parameters: the model's, by id.
        names: of those, by id.
        filled: whether there has been a backward since the last step.
        settled: whether they have been reduced to where the engine's step reads them.
        written: what is settled has been changed since.
        running: a backward of the backend is running.
        order: in which order backwards reduce; None where none does.
        backwards: how many have begun.
        keeps: whether parameters hold gradients when these are settled.
        spread: whether ranks hold different parts when they are settled.
        presence: which parameters have got any.
        left_out: keeps parameters without a gradient on any rank unchanged in a step; None: the optimizer does.
    """

    keeps: ClassVar[bool] = False
    spread: ClassVar[bool] = True

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.optimizer = engine.optimizer
        self.filled = False
        self.settled = self.written = False
        self.running = False
        self._boundary: bool | None = None
        self.parameters: dict[int, nn.Parameter] = {id(one): one for one in engine.module.parameters()}
        self.names = {id(one): name for name, one in engine.module.named_parameters()}
        self.presence = Presence([one for one in self.parameters.values() if one.requires_grad], engine.device)
        self.left_out: LeftOut | None = None
        held = {id(one) for group in engine.basic_optimizer.param_groups for one in group["params"]}
        self._frozen = [one for one in self.parameters.values() if not one.requires_grad and id(one) not in held]
        # Called with this rank's parts just before each step.
        self.watchers: OrderedDict[int, Keep] = OrderedDict()
        # The norm that the next step clips to, and the norm that was measured then; None: no clip waits for the step.
        self._clip: tuple[float, torch.Tensor] | None = None
        # An object, the name of a method of it, and the result for the settled gradients, which the step takes instead.
        self._done: tuple[Any, str, Any] | None = None
        self.order: ReductionOrder | None = None
        self._by_hand = ByHand(engine, lambda: self.running)
        self.backwards = 0
        self._reads = Reads(dict(engine.module.named_parameters()))
        self._shown = engine.register_forward_pre_hook(self._reads.show)  # torch.compile guards on classes

    def backward(self, run: Callable[[], Any]) -> None:
        """Runs one backward, which adds to the accumulated gradients."""
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
        """Restores the engine's own methods."""
        self._reads.remove()
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
        """Refuses to leave out a step for which there are gradients of other backwards than the backend's.

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
        """Refuses a step that would leave out gradients or parameters silently.

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
        """Multiplies the accumulated gradients."""
        self._open()
        for tensor in self.pending():
            tensor.mul_(factor.to(tensor.device, tensor.dtype) if isinstance(factor, torch.Tensor) else factor)

    def norm(self) -> torch.Tensor:
        """The norm over all ranks, the loss scale taken out; inf where it is not finite; collective."""
        self.settle()
        norm = torch.as_tensor(self.scaled_norm(), dtype=torch.float32)
        return norm if self.loss_scale == 1.0 else norm / self.loss_scale

    def clip(self, max_norm: float, norm: torch.Tensor) -> None:
        """Makes the next step clip to ``max_norm``; ``norm`` is the norm now."""
        self.optimizer.clip_grad = max_norm
        self._clip = max_norm, norm

    def clip_now(self) -> None:
        """Clips to what the next step would clip to, before gradients are changed in another way."""
        if self._clip is None:
            return
        max_norm, norm = self._clip
        self.shrink(torch.clamp(max_norm / (norm + 1e-6), max=1.0))
        self._unclip()
        self.changed()

    def shrink(self, factor: torch.Tensor) -> None:
        """Multiplies what is settled."""
        for tensor in self.in_place():
            tensor.mul_(factor.to(tensor.device, tensor.dtype))

    def changed(self) -> None:
        """What is settled was written to: it has to be measured again."""
        self._done = None
        self.written = True
        self.measure()

    def pieces(self, what: str) -> Mapping[int, torch.Tensor]:
        """What of each parameter's settled gradient the next step takes, by the parameter's id. Default: ``parts``.

        Raises:
            BackendError: it is on a disk; ``what`` was to be done with it.
        """
        return self.parts()

    def step(self) -> bool:
        """Reduces what is left to reduce, and updates; False if the engine left the step out. Collective.

        Raises:
            BackendError: it would leave out gradients or parameters silently.
        """
        self._reads.show()
        self._check()
        self.settle()
        self._reads.show()
        for keep in self.watchers.values():
            keep(self.parts())
        absent = self.absent()
        done = self._done
        if done is not None:
            setattr(done[0], done[1], lambda: done[2])
        self.at_boundary(True)
        left_out = nullcontext() if self.left_out is None else self.left_out.around(absent)
        try:
            with left_out:
                self.engine.step()
        finally:
            if done is not None:
                delattr(done[0], done[1])
        self.stepped()
        return bool(self.engine.was_step_applied())

    def stepped(self) -> None:
        """Starts the next window: the gradients have been stepped with or dropped, and a clip was for them only."""
        self._reads.show()
        self._unclip()
        self.filled = self.settled = self.written = False
        self._done = None
        self.presence.received.clear()

    def _refuse_updates(self, what: str) -> None:
        raise BackendError(
            f"{what}: DeepSpeed's {type(self.engine.basic_optimizer).__name__} has made updates of the gradients by "
            "then; nearest: clip_grad_norm_ of all parameters with norm_type=2"
        )

    def _unclip(self) -> None:
        self._clip = None
        if hasattr(self.optimizer, "clip_grad"):
            self.optimizer.clip_grad = self.engine.gradient_clipping()

    def at_boundary(self, boundary: bool) -> None:
        """Whether what the engine does next is for the end of a window: a reduction or a step."""
        if boundary is not self._boundary:  # setting it costs as much as a small kernel
            self.engine.set_gradient_accumulation_boundary(boundary)
            self._boundary = boundary

    def _open(self) -> None:
        """Before accumulated gradients are added to or changed."""
        if self.settled:
            self.clip_now()
            self.reopen()
            self.settled = self.written = False
        self._done = None

    def held(self, parameters: Mapping[str, nn.Parameter]) -> dict[str, torch.Tensor]:
        """Full gradients by name, of which the average over ranks is the gradient; collective. Default: reduced.

        Parameters that no rank has a gradient of are left out.
        """
        self.settle()
        absent = set(map(id, self.absent()))
        there = {name: one for name, one in parameters.items() if one.requires_grad and id(one) not in absent}
        return {name: self.whole(parameter) for name, parameter in there.items()}

    def hold(
        self, parameters: Mapping[str, nn.Parameter], shares: Mapping[str, torch.Tensor], brought: Collection[str]
    ) -> None:
        """Starts a window with the average of these shares; ``brought`` are the names that any rank has. Collective."""
        import torch.distributed as dist

        for name, parameter in parameters.items():
            if not parameter.requires_grad or (name not in brought and self.order is None):
                continue  # without an order parameters hold gradients, and one of zeros would count as present
            shape = shape_of(parameter)
            device, dtype = self.engine.device, self.dtype
            mine = shares.get(name)
            total = (
                torch.zeros(shape, device=device, dtype=dtype) if mine is None else mine.to(device, dtype, copy=True)
            )
            if name in brought and dist.get_world_size() > 1:
                dist.all_reduce(total)
            if name in brought:
                self.presence.add([parameter])
            mine = shard_of_full(parameter, total.div_(dist.get_world_size()))
            self.begin(parameter, mine.view(local_shape_of(parameter)))
        self.begun()
        self.filled = True

    def absent(self) -> list[nn.Parameter]:
        """The parameters that no rank has a gradient of; collective."""
        import torch.distributed as dist

        if dist.get_world_size() == 1:
            return self.presence.absent(None)
        everywhere = self.presence.here().clone()
        dist.all_reduce(everywhere, group=getattr(self.optimizer, "dp_process_group", None))
        return self.presence.absent(everywhere)

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss as the engine's backward is to get it. Default: as it is, the engine scales it."""
        return loss

    @property
    def loss_scale(self) -> float:
        """The factor by which gradients are multiplied until the step."""
        return float(getattr(self.optimizer, "loss_scale", 1.0))

    @property
    def group(self) -> Any:
        """The ranks that settled gradients are spread over; None: all."""
        return getattr(self.optimizer, "dp_process_group", None)

    @property
    def uneven(self) -> str:
        """What makes some elements count on several ranks and others on one; empty: nothing."""
        if self.engine.autotp_size() > 1:
            return "layers that ranks share"
        return "experts" if getattr(self.optimizer, "has_moe_layers", False) else ""

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
        return full_of_shard(parameter, found.detach().clone())

    def begun(self) -> None:
        """All parameters have been given to ``begin``. Default: nothing is left to do."""

    @abstractmethod
    def begin(self, parameter: nn.Parameter, gradient: torch.Tensor) -> None:
        """Stores the first gradient of a window, averaged over ranks, of the part that this rank computes with."""

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
        """Before more is added after ``reduce``."""

    @abstractmethod
    def pending(self) -> Iterable[torch.Tensor]:
        """The tensors that hold what is not settled."""

    @abstractmethod
    def scaled_norm(self) -> Any:
        """The norm of what is settled, times the loss scale; inf where it is not finite."""

    @abstractmethod
    def discard(self) -> None:
        """Drops everything accumulated."""


def gradients_of(engine: Any) -> Gradients:
    """The accumulated gradients of an engine, by where its optimizer keeps them.

    Raises:
        BackendError: an optimizer that keeps them elsewhere.
    """
    optimizer = engine.optimizer
    if hasattr(optimizer, "grad_partitions_flat_buffer"):
        from accel_deepspeed.zero.stage3 import ShardedGradients

        return ShardedGradients(engine)
    if hasattr(optimizer, "averaged_gradients"):
        from accel_deepspeed.zero.stage12 import PartitionedGradients

        return PartitionedGradients(engine)
    if engine.zero_optimization():
        raise BackendError(
            f"DeepSpeed's {type(optimizer).__name__} is not supported; it is used at stage 1 in bf16 with "
            "data_types.grad_accum_dtype fp32: leave that out, or use stage 2"
        )
    from accel_deepspeed.zero.stage0 import WholeGradients

    return WholeGradients(engine)

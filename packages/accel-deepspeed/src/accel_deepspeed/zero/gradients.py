"""Accumulated gradients of an engine: reduced when they are needed, measured, scaled and dropped.

DeepSpeed reduces in the last backward of an accumulation window of fixed length. Here no backward is marked as the last
one: each adds to the accumulated gradients, and ``settle`` reduces them when a norm or a step needs them. A window may
therefore end after any backward, a micro-batch may have several losses, and gradients may be weighted before they are
reduced.
"""

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from typing import Any, ClassVar

import torch
from torch import nn

from accel_backends.ops.fqn import few
from accel_backends.roles.gradients import Keep
from accel_deepspeed.engine.manual_backward import ByHand
from accel_deepspeed.tensor_parallel.shards import full_of_shard
from accel_deepspeed.zero.gradient_reads import Reads
from accel_deepspeed.zero.missing_gradients import LeftOut, Presence
from accel_deepspeed.zero.partitions import Partitions
from accel_deepspeed.zero.reduction_order import ReductionOrder
from accel_state.errors import BackendError

Factor = float | torch.Tensor


def multiply(tensors: Iterable[torch.Tensor], factor: Factor) -> None:
    """Multiplies tensors in place, on whichever device and in whichever dtype each is."""
    for tensor in tensors:
        tensor.mul_(factor.to(tensor.device, tensor.dtype) if isinstance(factor, torch.Tensor) else factor)


class Gradients(ABC):
    """Gradients that one engine has accumulated since its last step.

    Attributes:
        engine: the engine.
        parameters: the model's parameters by id.
        names: FQNs of the parameters by id.
        filled: a backward has run since the last step.
        settled: gradients are reduced, in the tensors that the engine's step reads.
        written: settled gradients have been changed since.
        running: a backward of the backend is running.
        order: order in which backwards reduce; None if backwards do not reduce.
        backwards: number of backwards that have begun.
        keeps: whether settled gradients are in ``parameter.grad``.
        spread: whether settled gradients are partitioned over ranks.
        offload: settled gradients are in host memory, beside the optimizer's tensors, or on disk.
        presence: records which parameters have received a gradient.
        left_out: keeps parameters without a gradient on any rank unchanged in a step; None if the optimizer does so.
    """

    keeps: ClassVar[bool] = False
    spread: ClassVar[bool] = True
    offload: bool = False

    def __init__(self, engine: Any, partitions: Partitions | None) -> None:
        self.engine = engine
        self.optimizer = engine.optimizer
        self._partitions = partitions
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
        # Called with this rank's shards just before each step.
        self.watchers: OrderedDict[int, Keep] = OrderedDict()
        # Norm to which the next step clips, and the norm measured at that call; None: no clip is pending.
        self._clip: tuple[float, torch.Tensor] | None = None
        # Object, method name, and a function that returns the method's results for the settled gradients again.
        self._done: tuple[Any, str, Callable[..., Any]] | None = None
        self.order: ReductionOrder | None = None
        # Number of ranks that have a gradient of each parameter, if it was all-reduced together with other values.
        self._everywhere: torch.Tensor | None = None
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
            clear()  # otherwise stage 3 takes two backwards with no forward between them for one
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
        """Reduces the accumulated gradients.

        Collective: every rank of the group must call this.

        Raises:
            BackendError: no backward has run.
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
        """Refuses to skip a step for which gradients exist that do not come from the backend's backward.

        Raises:
            BackendError: the user called the engine's own ``backward``, or ``loss.backward()``.
        """
        if self._by_hand.own:
            raise BackendError(
                "the engine's own backward was called, whose gradients accelerator's step does not take; call "
                "accelerator.backward(loss), or the engine's own step, too"
            )
        self._check()

    def _check(self) -> None:
        """Raises BackendError for a step that would silently ignore gradients or parameters."""
        thawed = [self.names[id(one)] for one in self._frozen if one.requires_grad]
        if thawed:
            raise BackendError(
                f"{few(thawed, 3)}: frozen when the model was prepared, and trained since; a DeepSpeed engine steps "
                "the parameters that required gradients then; call requires_grad_(True) before prepare"
            )
        if self.order is not None:
            self.order.check()

    def scale(self, factor: Factor) -> None:
        """Multiplies the accumulated gradients."""
        if self.settled:  # by a norm within the window; DeepSpeed reduces nothing again without a backward
            self.clip_now()
            self.shrink(factor)
            self.changed()
            return
        multiply(self.pending(), factor)

    def norm(self) -> torch.Tensor:
        """Returns the norm over all ranks, without the loss scale; inf if it is not finite.

        Collective: every rank of the group must call this.
        """
        self.settle()
        norm = torch.as_tensor(self.scaled_norm(), dtype=torch.float32)
        return norm if self.loss_scale == 1.0 else norm / self.loss_scale

    def clip(self, max_norm: float, norm: torch.Tensor) -> None:
        """Makes the next step clip to ``max_norm``; ``norm`` is the present norm."""
        self.optimizer.clip_grad = max_norm
        self._clip = max_norm, norm

    def clip_now(self) -> None:
        """Applies the pending clip at once, before gradients are changed in another way."""
        if self._clip is None:
            return
        max_norm, norm = self._clip
        self.shrink(torch.clamp(max_norm / (norm + 1e-6), max=1.0))
        self._unclip()
        self.changed()

    def shrink(self, factor: Factor) -> None:
        """Multiplies the settled gradients."""
        multiply(self.in_place(), factor)

    def changed(self) -> None:
        """Records that settled gradients were written to, and measures them again."""
        self._done = None
        self.written = True
        self.measure()

    def pieces(self, what: str) -> Mapping[int, torch.Tensor]:
        """Returns, by parameter id, this rank's slice of the settled gradient that the next step uses.

        Raises:
            BackendError: gradients are on disk, or the optimizer (Muon) has replaced them by its updates; ``what``
                names the call.
        """
        if self.spread and any(map(self.is_updated, self.parameters.values())):  # the same on all ranks
            raise BackendError(
                f"{what}: DeepSpeed's {type(self.engine.basic_optimizer).__name__} has made updates of the gradients "
                "by then; nearest: clip_grad_norm_ of all parameters with norm_type=2"
            )
        if not self.offload:
            return self.parts()
        if any(flat.grad is None for flat in self._flats()):
            raise BackendError(
                f"{what}: gradients have gone to the disk with the optimizer (nvme); nearest: clip_grad_norm_ of all "
                "parameters with norm_type=2, or offload_optimizer_device='cpu'"
            )
        return {id(parameter): part for parameter, part in self.on_host()}

    def is_updated(self, parameter: nn.Parameter) -> bool:
        """Whether the optimizer (Muon) replaces the gradient of a parameter by its update before the step."""
        muon = "muon" in type(self.engine.basic_optimizer).__name__.lower()
        return muon and bool(getattr(parameter, "use_muon", False))

    def step(self) -> bool:
        """Reduces unreduced gradients and steps; returns False if the engine skipped the step.

        Collective: every rank of the group must call this.

        Raises:
            BackendError: the step would silently ignore gradients or parameters.
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
            setattr(*done)
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
        """Starts the next accumulation window: gradients have been used or dropped, and a pending clip expires."""
        self._reads.show()
        self._unclip()
        self.filled = self.settled = self.written = False
        self._done = None
        self.presence.received.clear()

    def _unclip(self) -> None:
        self._clip = None
        if hasattr(self.optimizer, "clip_grad"):
            self.optimizer.clip_grad = self.engine.gradient_clipping()

    def at_boundary(self, boundary: bool) -> None:
        """Sets whether the engine's next operation (reduction or step) is at the end of an accumulation window."""
        if boundary is not self._boundary:  # the setter costs as much as a small kernel
            self.engine.set_gradient_accumulation_boundary(boundary)
            self._boundary = boundary

    def _open(self) -> None:
        """Makes settled gradients accumulate again, before more is added or they are scaled."""
        if self.settled:
            self.clip_now()
            self.reopen()
            self.settled = self.written = False
        self._done = None

    def held(self, parameters: Mapping[str, nn.Parameter]) -> dict[str, torch.Tensor]:
        """Returns full gradients by FQN, whose mean over ranks is the gradient. Default: reduced gradients.

        Parameters without a gradient on any rank are left out.

        Collective: every rank of the group must call this.
        """
        self.settle()
        absent = set(map(id, self.absent()))
        there = {name: one for name, one in parameters.items() if one.requires_grad and id(one) not in absent}
        return {name: self.full(parameter) for name, parameter in there.items()}

    def absent(self) -> list[nn.Parameter]:
        """Returns the parameters without a gradient on any rank. Collective: every rank of the group must call this."""
        import torch.distributed as dist

        if dist.get_world_size() == 1:
            return self.presence.absent(None)
        everywhere = self.presence.here().clone()
        dist.all_reduce(everywhere, group=getattr(self.optimizer, "dp_process_group", None))
        return self.presence.absent(everywhere)

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """Returns the loss to pass to the engine's backward. Default: unchanged, the engine scales it."""
        return loss

    @property
    def loss_scale(self) -> float:
        """Loss scale that gradients carry until the step."""
        return float(getattr(self.optimizer, "loss_scale", 1.0))

    @property
    def group(self) -> Any:
        """Ranks over which settled gradients are partitioned; None: all."""
        return getattr(self.optimizer, "dp_process_group", None)

    @property
    def uneven(self) -> str:
        """Reason why some elements are replicated and others are on one rank only; empty if there is none."""
        if self.engine.autotp_size() > 1:
            return "tensor-parallel layers"
        return "experts" if getattr(self.optimizer, "has_moe_layers", False) else ""

    @property
    def dtype(self) -> torch.dtype:
        """Dtype in which gradients accumulate."""
        found: torch.dtype = self.engine.get_data_types()[1]
        return found

    def measure(self) -> None:
        """Measures again the norms that the optimizer measured when it copied gradients to the host."""
        for parameter, part in self.on_host():
            self.optimizer.norm_for_param_grads[self.optimizer.get_param_id(parameter)] = torch.linalg.vector_norm(part)

    def on_host(self) -> Iterable[tuple[nn.Parameter, torch.Tensor]]:
        """Returns parameters and this rank's slices of their gradients in host memory; none without offloading."""
        held = self._partitions if self.offload else None
        return () if held is None else held.gradients(self.parameters.values())

    def _flats(self) -> list[torch.Tensor]:
        """Returns the optimizer's tensors."""
        return [] if self._partitions is None else self._partitions.flats()

    def full(self, parameter: nn.Parameter) -> torch.Tensor:
        """Returns a full settled gradient. Collective: every rank of the group must call this."""
        from deepspeed.utils import safe_get_full_grad

        found: torch.Tensor = safe_get_full_grad(parameter)
        return full_of_shard(parameter, found.detach().clone())

    def begun(self) -> None:
        """Called after ``begin`` of all parameters. Default: does nothing."""

    @abstractmethod
    def begin(self, parameter: nn.Parameter, gradient: torch.Tensor) -> None:
        """Stores the first gradient of a window, already averaged over ranks.

        ``gradient`` is a tensor-parallel shard.
        """

    def in_place(self) -> list[torch.Tensor]:
        """Returns the tensors of settled gradients that the step reads."""
        if self.offload:
            return [flat.grad for flat in self._flats() if flat.grad is not None]
        return self.on_device()

    @abstractmethod
    def on_device(self) -> list[torch.Tensor]:
        """Returns the tensors of settled gradients on the training device."""

    @abstractmethod
    def parts(self) -> dict[int, torch.Tensor]:
        """Returns, by parameter id, this rank's slices of settled gradients."""

    @abstractmethod
    def reduce(self) -> None:
        """Reduces gradients into the tensors that the step reads.

        Collective: every rank of the group must call this.
        """

    @abstractmethod
    def reopen(self) -> None:
        """Prepares for further accumulation after ``reduce``."""

    @abstractmethod
    def pending(self) -> Iterable[torch.Tensor]:
        """Returns the tensors with unsettled gradients."""

    @abstractmethod
    def scaled_norm(self) -> Any:
        """Returns the norm of settled gradients times the loss scale; inf if it is not finite."""

    @abstractmethod
    def discard(self) -> None:
        """Drops all accumulated gradients."""

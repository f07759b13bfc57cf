"""Accumulated gradients of an engine: reduced when they are needed, measured, scaled and dropped.

DeepSpeed reduces in the last backward of an accumulation window of fixed length. Here no backward is marked as the last
one: each adds to the accumulated gradients, and ``settle`` reduces them when a norm or a step needs them. A window may
therefore end after any backward, a micro-batch may have several losses, and gradients may be weighted before they are
reduced.
"""

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping
from contextlib import nullcontext
from typing import Any, ClassVar

import torch
from torch import nn

from accel_backends.ops.clip import listed
from accel_backends.ops.gradient_observer import Keep
from accel_deepspeed.tensor_parallel.shards import full_of_shard, shape_of, shard_of_full
from accel_deepspeed.zero.arrivals import Arrivals
from accel_deepspeed.zero.gradient_reads import Reads
from accel_deepspeed.zero.left_out import LeftOut
from accel_deepspeed.zero.partitions import Partitions
from accel_state.errors import BackendError
from accel_state.logging import get_logger

_log = get_logger(__name__)
Factor = float | torch.Tensor


class Gradients(ABC):
    """Gradients that one engine has accumulated since its last step.

    Attributes:
        engine: the engine.
        layout: partitions of the optimizer's tensors; None if it updates full parameters themselves.
        parameters: the model's parameters by id.
        names: FQNs of the parameters by id.
        settled: gradients are reduced, in the tensors that the engine's step reads.
        written: settled gradients have been changed since.
        arrivals: record of the gradients of each backward at stages 2 and 3, which reduce then; None at others.
        backwards: number of backwards that have begun.
        stepping: the engine's step is running.
        trained: parameters that required gradients when the engine was created.
        keeps: whether settled gradients are in ``parameter.grad``.
        spread: whether settled gradients are partitioned over ranks.
        left_out: keeps parameters without a gradient on any rank unchanged in a step; None if the optimizer does so.
    """

    keeps: ClassVar[bool] = False
    spread: ClassVar[bool] = True

    def __init__(self, engine: Any, layout: Partitions | None) -> None:
        self.engine, self.layout = engine, layout
        self.optimizer = engine.optimizer
        self.settled = self.written = self.stepping = self._filled = self._warned = False
        self._boundary: bool | None = None
        named = dict(engine.module.named_parameters())
        self.parameters: dict[int, nn.Parameter] = {id(one): one for one in named.values()}
        self.names = {id(one): name for name, one in named.items()}
        self.left_out: LeftOut | None = None
        held = {id(one) for group in engine.basic_optimizer.param_groups for one in group["params"]}
        self._frozen = [one for one in self.parameters.values() if not one.requires_grad and id(one) not in held]
        self.trained = [one for one in self.parameters.values() if one.requires_grad]
        # Called with this rank's shards just before each step.
        self.watchers: OrderedDict[int, Keep] = OrderedDict()
        # Norm to which the next step clips, and the norm measured at that call; None: no clip is pending.
        self._clip: tuple[float, torch.Tensor] | None = None
        # Mean gradients of a window that was loaded, which the next reduction adds, by FQN.
        self._loaded: dict[str, torch.Tensor] = {}
        self._loaded_at = 0
        self.arrivals: Arrivals | None = None
        self.backwards = 0
        self._reads = Reads(named)
        self._shown = engine.register_forward_pre_hook(self._reads.show)  # torch.compile guards on classes

    @property
    def filled(self) -> bool:
        """Whether there are gradients since the last step."""
        return self.ran or bool(self._loaded)

    @property
    def ran(self) -> bool:
        """Whether a backward has run since the last step."""
        return self._filled or (self.arrivals is not None and self.arrivals.any)

    def begin(self) -> None:
        """Prepares a backward, which adds to the accumulated gradients."""
        self._reads.show()
        self.backwards += 1
        self._open()
        self.at_boundary(False)
        clear = getattr(self.optimizer, "clear_backward_seen_flag", None)
        if clear is not None:
            clear()  # otherwise stage 3 takes two backwards with no forward between them for one
        if self.arrivals is not None:
            self.arrivals.separate()

    def end(self) -> None:
        """Records that a backward has run."""
        self._filled = True
        if self.arrivals is not None:
            self._reads.hide()

    def remove(self) -> None:
        """Removes all hooks."""
        self._reads.remove()
        self._shown.remove()
        if self.arrivals is not None:
            self.arrivals.remove()

    def settle(self) -> None:
        """Reduces the accumulated gradients.

        Collective: every rank of the group must call this.

        Raises:
            BackendError: no backward has run, or ranks have computed gradients of different parameters.
        """
        if self.settled:
            return
        if not self.filled:
            raise BackendError("an optimizer step without gradients: no backward has run since the step before")
        self._reads.show()
        if self.arrivals is not None:
            self.arrivals.compare()
        self.reduce()
        self._add_loaded()
        self.settled = True
        if not self.keeps:
            self._reads.hide()

    def _add_loaded(self) -> None:
        """Adds this rank's slices of the gradients of a loaded window."""
        if not self._loaded:
            return
        pieces = self.pieces("a window that was open in a checkpoint")
        for key, parameter in self.parameters.items():
            whole = self._loaded.get(self.names[key])
            if whole is None or key not in pieces:
                continue
            flat, piece = shard_of_full(parameter, whole), pieces[key].view(-1)
            part = None if self.layout is None else self.layout.part(parameter)
            start, size = (0, piece.numel()) if part is None else (part.start, part.size)
            piece[:size].add_(flat[start : start + size].to(piece.device, piece.dtype))
        self.measure()

    def check(self) -> None:
        """Refuses a step that would silently ignore gradients or parameters.

        Raises:
            BackendError: see the messages.
        """
        thawed = [self.names[id(one)] for one in self._frozen if one.requires_grad]
        if thawed:
            raise BackendError(
                f"{listed(thawed, 3)}: frozen when the model was prepared, and trained since; a DeepSpeed engine steps "
                "the parameters that required gradients then; call requires_grad_(True) before prepare"
            )
        if self.arrivals is None:
            return
        self._reads.show()
        given = next((name for key, name in self.names.items() if self.parameters[key].grad is not None), None)
        if given is not None:
            raise BackendError(
                f"{given}.grad was set after backward; ZeRO stages 2 and 3 have spread the gradients over ranks by "
                "then, and step with those; scale the loss instead, or use zero_stage=1"
            )
        if late := self.arrivals.late:
            raise BackendError(
                f"{late} got a hook by register_post_accumulate_grad_hook after prepare; ZeRO stages 2 and 3 take its "
                "gradient before that runs; register it before prepare, or use register_hook"
            )

    def scale(self, factor: Factor) -> None:
        """Multiplies the accumulated gradients."""
        self._open()
        for tensor in (*self.pending(), *self._loaded.values()):
            tensor.mul_(factor.to(tensor.device, tensor.dtype) if isinstance(factor, torch.Tensor) else factor)

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
        factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        for tensor in self.in_place():
            tensor.mul_(factor.to(tensor.device, tensor.dtype))
        self._unclip()
        self.changed()

    def changed(self) -> None:
        """Records that settled gradients were written to, and measures them again."""
        self.written = True
        self.measure()

    def pieces(self, what: str) -> Mapping[int, torch.Tensor]:
        """Returns, by parameter id, the slice of the settled gradient that the next step uses. Default: ``parts``.

        Raises:
            BackendError: gradients are on disk; ``what`` names the call.
        """
        return self.parts()

    def step(self) -> bool:
        """Reduces unreduced gradients and steps; returns False if the engine skipped the step.

        Collective: every rank of the group must call this.

        Raises:
            BackendError: the step would silently ignore gradients or parameters.
        """
        self.check()
        self.settle()
        self._reads.show()
        for keep in self.watchers.values():
            keep(self.parts())
        absent = [one for one in self.absent() if self.names[id(one)] not in self._loaded]
        if absent and not self._warned:
            _log.warning(
                "no rank has a gradient of %s in the first step without it, which stay as they are; such parameters "
                "may be unused, frozen, or in activation checkpointing whose inputs require no gradients",
                listed([self.names[id(one)] for one in absent], 3),
            )
            self._warned = True
        self.at_boundary(True)
        self.stepping = True
        try:
            with nullcontext() if self.left_out is None else self.left_out.around(absent):
                self.engine.step()
        finally:
            self.stepping = False
        self.stepped()
        return bool(self.engine.was_step_applied())

    def stepped(self) -> None:
        """Starts the next accumulation window: gradients have been used or dropped, and a pending clip expires."""
        self._reads.show()
        self._unclip()
        self.at_boundary(False)
        self._filled = self.settled = self.written = False
        self._loaded.clear()
        if self.arrivals is not None:
            self.arrivals.forget()

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

    def held(self, parameters: Mapping[str, nn.Parameter]) -> dict[str, torch.Tensor]:
        """Returns full gradients by FQN, whose mean over ranks is the gradient. Default: reduced gradients.

        Parameters without a gradient on any rank are left out.

        Collective: every rank of the group must call this.
        """
        if self._loaded and self.backwards == self._loaded_at:
            return {name: held.clone() for name, held in self._loaded.items()}
        self.settle()
        absent = {self.names[id(one)] for one in self.absent()} - self._loaded.keys()
        there = {name: one for name, one in parameters.items() if one.requires_grad and name not in absent}
        return {name: self.whole(parameter) for name, parameter in there.items()}

    def hold(
        self, parameters: Mapping[str, nn.Parameter], shares: Mapping[str, torch.Tensor], brought: Collection[str]
    ) -> None:
        """Starts an accumulation window with the mean of ``shares``; ``brought``: names that any rank has.

        Collective: every rank of the group must call this.
        """
        import torch.distributed as dist

        for name, parameter in parameters.items():
            if name not in brought or not parameter.requires_grad:
                continue
            total = torch.zeros(shape_of(parameter), device=self.engine.device, dtype=self.dtype)
            if name in shares:
                total.copy_(shares[name])
            if dist.get_world_size() > 1:
                dist.all_reduce(total)
            self._loaded[name] = total.div_(dist.get_world_size())
        self._loaded_at = self.backwards

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
            return "layers that ranks share"
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
        """Yields parameters and this rank's slices of their gradients in host memory. Default: none."""
        return ()

    def whole(self, parameter: nn.Parameter) -> torch.Tensor:
        """Returns a full settled gradient. Collective: every rank of the group must call this."""
        from deepspeed.utils import safe_get_full_grad

        found: torch.Tensor = safe_get_full_grad(parameter)
        return full_of_shard(parameter, found.detach().clone())

    def absent(self) -> list[nn.Parameter]:
        """Returns the parameters without a gradient on any rank, after ``settle``."""
        assert self.arrivals is not None
        received = self.arrivals.received  # equal on all ranks
        return [one for one in self.trained if id(one) not in received]

    @abstractmethod
    def in_place(self) -> list[torch.Tensor]:
        """Returns the tensors of settled gradients that the step reads."""

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


def absent_everywhere(gradients: Gradients, present: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """Returns the trainable parameters that are present on no rank.

    Collective: every rank of the group must call this.
    """
    import torch.distributed as dist

    here = set(map(id, present))
    trained = gradients.trained
    there = torch.tensor([id(one) in here for one in trained], dtype=torch.uint8, device=gradients.engine.device)
    if dist.get_world_size(gradients.group) > 1:
        dist.all_reduce(there, dist.ReduceOp.MAX, group=gradients.group)
    return [one for one, found in zip(trained, there.tolist(), strict=True) if not found]


def gradients_of(engine: Any, layout: Partitions | None) -> Gradients:
    """Returns the accumulated gradients of an engine, by the kind of its optimizer.

    Raises:
        BackendError: an unsupported optimizer of DeepSpeed.
    """
    optimizer = engine.optimizer
    if hasattr(optimizer, "grad_partitions_flat_buffer"):
        from accel_deepspeed.zero.stage3 import ShardedGradients

        return ShardedGradients(engine, layout)
    if hasattr(optimizer, "averaged_gradients"):
        from accel_deepspeed.zero.stage12 import PartitionedGradients

        return PartitionedGradients(engine, layout)
    if engine.zero_optimization():
        raise BackendError(
            f"DeepSpeed's {type(optimizer).__name__} is not supported; it is used at stage 1 in bf16 with "
            "data_types.grad_accum_dtype fp32: leave that out, or use stage 2"
        )
    from accel_deepspeed.zero.stage0 import WholeGradients

    return WholeGradients(engine, layout)

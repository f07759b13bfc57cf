"""Accumulation window of gradients in Megatron-LM's buffers."""

from collections.abc import Sequence
from typing import Any, final

import torch

from accel_state.errors import BackendError


@final
class WindowGradients:
    """Gradients of an accumulation window in Megatron-LM's buffers.

    Those of a call become part of the window in the backward of its loss. ``reduce`` averages them over ranks, once a
    window.

    Attributes:
        filled: whether the window has gradients.
        reduced: whether they are averaged over ranks.
        backwards: number of backwards so far.
        calls: number of calls whose gradients were computed so far.
    """

    def __init__(self, chunks: Sequence[Any]) -> None:
        self._chunks = chunks
        self._earlier: list[torch.Tensor] | None = None
        self._open, self._scale = False, 1.0
        self.filled, self.reduced, self.backwards, self.calls = False, False, 0, 0

    @property
    def buffers(self) -> list[torch.Tensor]:
        """Megatron-LM's buffers of gradients."""
        return [one.grad_data for chunk in self._chunks for one in chunk.buffers + chunk.expert_parallel_buffers]

    def open(self, scale: float = 1.0) -> None:
        """Sets the window's gradients aside, and clears the buffers for those of a call, times ``scale``."""
        if self._open:  # the last call's gradients got no backward
            self._restore()
        self._earlier = [one.clone() for one in self.buffers] if self.filled else None
        if self.reduced:  # the optimizer has the buffers as gradients, to which the schedule would add its own twice
            for chunk in self._chunks:
                chunk.zero_grad()
        self._zero()
        self._open, self._scale = True, scale
        self.calls += 1

    def commit(self, factor: torch.Tensor, call: int) -> None:
        """Adds ``factor`` times the gradients of the last call, which must be number ``call``, to the window.

        Raises:
            BackendError: a second backward of the same loss, or of a loss of an earlier call; or the window's gradients
                are averaged over ranks already.
        """
        if not self._open or call != self.calls:
            raise BackendError(
                "backward of a loss whose gradients are used already, or discarded by a later call in training; call "
                "the model again"
            )
        if self.reduced:
            raise BackendError(
                "a backward after clip_grad_norm_ or a step, without zero_grad: these gradients are averaged over ranks"
                " already; call optimizer.zero_grad() after each step, or before each backward"
            )
        for position, buffer in enumerate(self.buffers):
            buffer.mul_((factor / self._scale).to(buffer.dtype))
            if self._earlier is not None:
                buffer.add_(self._earlier[position])
        self._earlier, self._open, self.filled = None, False, True
        self.backwards += 1

    def reduce(self) -> None:
        """Averages the window's gradients over ranks, if they are not averaged yet.

        Collective: every rank of the group must call this.
        """
        from megatron.core.distributed.finalize_model_grads import finalize_model_grads

        if self._open:
            self._restore()
        if not self.reduced and self.filled:
            finalize_model_grads(list(self._chunks))
            self.reduced = True

    def end(self) -> None:
        """Drops the window's gradients; those of a call whose backward has not run begin the next window."""
        if not self._open:
            self._zero()
        self._earlier, self.filled, self.reduced = None, False, False

    def clear(self) -> None:
        """Drops all gradients."""
        self._zero()
        self._earlier, self._open, self.filled, self.reduced = None, False, False, False

    def _zero(self) -> None:
        for chunk in self._chunks:
            chunk.zero_grad_buffer()

    def _restore(self) -> None:
        for position, buffer in enumerate(self.buffers):
            buffer.zero_() if self._earlier is None else buffer.copy_(self._earlier[position])
        self._earlier, self._open = None, False


class Scheduled(torch.autograd.Function):
    """A loss whose backward has been computed, by the schedule."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, loss: torch.Tensor, gradients: WindowGradients) -> torch.Tensor:
        ctx.gradients, ctx.call = gradients, gradients.calls
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *factors: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        ctx.gradients.commit(factors[0], ctx.call)
        return torch.zeros_like(factors[0]), None, None

"""Refusal of backwards that bypass the backend, whose gradients an engine would lose."""

from collections.abc import Callable
from typing import Any, final

import torch

from accel_deepspeed.private import in_own_backward, is_accumulating, replace_prologues, restore_prologues
from accel_state.errors import BackendError


@final
class ByHand:
    """Checks every backward that reaches the outputs of an engine, before it reaches the model.

    A direct ``loss.backward()`` would accumulate gradients that no step uses, without the loss scale and in DeepSpeed's
    own accumulation windows. ``torch.autograd.grad`` changes no gradient and is allowed, but not with
    ``create_graph=True`` at stage 3, which frees gathered parameters before the result is differentiated. For the same
    reason each forward can have only one backward at stage 3.

    Args:
        engine: two of its methods are replaced until ``remove``.
        runs: returns whether a backward of the backend is running.

    Attributes:
        own: the engine's own ``backward`` has been called since the backend's.
    """

    def __init__(self, engine: Any, runs: Callable[[], bool]) -> None:
        self._engine, self._runs = engine, runs
        self._begin = replace_prologues(engine, self._look, self._look_again)
        self._begun = self.own = False
        self._full = not engine.zero_optimization_partition_weights()

    def remove(self) -> None:
        """Restores the engine's own methods."""
        restore_prologues(self._engine)

    def start(self) -> None:
        """Marks the start of a backward of the backend."""
        self._begun = self.own = False

    def _look(self) -> None:
        """Replaces the prologue that runs once for each forward, in the first backward that reaches its outputs."""
        if in_own_backward(self._engine):
            self.own |= not self._runs()
            self._begin()
            self._begun = True
        else:
            self._refuse()

    def _look_again(self, gradient: torch.Tensor) -> torch.Tensor:
        """Replaces the prologue that runs for each output in every backward."""
        if not in_own_backward(self._engine):
            self._refuse()
        elif self._runs() and not self._begun and not self._full:
            raise BackendError(
                "a second backward through one forward of a DeepSpeed engine of ZeRO stage 3, which freed the gathered "
                "parameters in the first; add the losses and call backward once, or use zero_stage=2"
            )
        return gradient

    def _refuse(self) -> None:
        if is_accumulating(self._engine.module.parameters()):
            raise BackendError(
                "backward() was called by hand on a loss that comes from a DeepSpeed engine, whose step would not take "
                "its gradients; call accelerator.backward(loss)"
            )
        if torch.is_grad_enabled() and not self._full:
            raise BackendError(
                "torch.autograd.grad(create_graph=True) through a DeepSpeed engine of ZeRO stage 3, which has freed "
                "gathered parameters when the result is differentiated; nearest: zero_stage=2, or "
                "strategy='ddp'"
            )

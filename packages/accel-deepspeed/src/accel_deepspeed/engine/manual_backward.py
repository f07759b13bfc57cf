"""Refusal of backwards that bypass the backend, whose gradients an engine would lose."""

from collections.abc import Callable, Iterable
from typing import Any, final

import torch
from torch import nn

from accel_state.errors import BackendError

_PER_OUTPUT = "_backward_prologue_per_tensor"
_ONCE = "_backward_prologue"


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
        self._begin: Callable[[], None] = engine._backward_prologue
        self._begun = self.own = False
        self._whole = not engine.zero_optimization_partition_weights()
        engine.__dict__[_ONCE] = self._look
        engine.__dict__[_PER_OUTPUT] = self._look_again

    def remove(self) -> None:
        """Restores the engine's own methods."""
        for name in (_ONCE, _PER_OUTPUT):
            self._engine.__dict__.pop(name, None)

    def start(self) -> None:
        """Marks the start of a backward of the backend."""
        self._begun = self.own = False

    def _look(self) -> None:
        """Replaces the prologue that runs once for each forward, in the first backward that reaches its outputs."""
        if self._engine._running_engine_backward:
            self.own |= not self._runs()
            self._begin()
            self._begun = True
        else:
            self._refuse()

    def _look_again(self, gradient: torch.Tensor) -> torch.Tensor:
        """Replaces the prologue that runs for each output in every backward."""
        if not self._engine._running_engine_backward:
            self._refuse()
        elif self._runs() and not self._begun and not self._whole:
            raise BackendError(
                "a second backward through one forward of a DeepSpeed engine of ZeRO stage 3, which freed the gathered "
                "parameters in the first; add the losses and call backward once, or use "
                "zero_stage=2"
            )
        return gradient

    def _refuse(self) -> None:
        if _accumulates(self._engine.module.parameters()):
            raise BackendError(
                "backward() was called by hand on a loss that comes from a DeepSpeed engine, whose step would not take "
                "its gradients; call accelerator.backward(loss)"
            )
        if torch.is_grad_enabled() and not self._whole:
            raise BackendError(
                "torch.autograd.grad(create_graph=True) through a DeepSpeed engine of ZeRO stage 3, which has freed "
                "gathered parameters when the result is differentiated; nearest: zero_stage=2, or "
                "strategy='ddp'"
            )


def _accumulates(parameters: Iterable[nn.Parameter]) -> bool:
    """Whether the running backward accumulates into any parameter; ``torch.autograd.grad`` accumulates into none."""
    from torch.autograd.graph import _get_grad_fn_or_grad_acc

    with torch.enable_grad():
        nodes = [_get_grad_fn_or_grad_acc(parameter) for parameter in parameters if parameter.requires_grad]
    try:
        return any(map(torch._C._will_engine_execute_node, nodes))
    except RuntimeError:  # for a parameter whose gradient torch.autograd.grad returns
        return False

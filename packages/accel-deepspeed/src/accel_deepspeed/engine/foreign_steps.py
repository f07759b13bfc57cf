"""Refusal of optimizer steps that the engine does not run itself."""

from collections.abc import Callable, Iterable
from typing import Any, final

from torch.optim import Optimizer

from accel_state.errors import BackendError


@final
class GivenSteps:
    """Makes ``step`` of an engine's optimizers raise BackendError, except within a step of the engine.

    Any other step would have no gradients, or those of one rank, and its updates would not reach the other ranks.

    Args:
        engine: one of its methods is replaced until ``remove``.
        optimizers: the engine's optimizer, and the optimizer that was given to ``prepare``.
    """

    def __init__(self, engine: Any, optimizers: Iterable[Optimizer]) -> None:
        self._engine = engine
        self._run: Callable[..., None] = engine.step
        self._stepping = False
        engine.__dict__["step"] = self._step
        alone = {id(one): one for one in optimizers}.values()
        self._handles = [one.register_step_pre_hook(self._look) for one in alone]

    def remove(self) -> None:
        """Removes the hooks and restores the engine's method."""
        self._engine.__dict__.pop("step", None)
        for handle in self._handles:
            handle.remove()

    def _step(self, *args: Any, **kwargs: Any) -> None:
        self._stepping = True
        try:
            self._run(*args, **kwargs)
        finally:
            self._stepping = False

    def _look(self, optimizer: Optimizer, *_: object) -> None:
        if not self._stepping:
            raise BackendError(
                f"step() of the {type(optimizer).__name__} that was given to prepare, which is inside of a DeepSpeed "
                "engine since then and has no gradients of its own; step the optimizer that prepare returned: "
                "model, optimizer = accelerator.prepare(model, optimizer)"
            )

"""Context manager of ``Accelerator.accumulate``: one micro-batch."""

from contextlib import ExitStack
from typing import TYPE_CHECKING, final

from torch import nn

if TYPE_CHECKING:
    from accel.accelerator import Accelerator


@final
class MicroBatch:
    """Context manager of ``accumulate``: a plain class, because a generator takes three times as long per step."""

    __slots__ = ("_accelerator", "_models", "_stack")

    def __init__(self, accelerator: "Accelerator", models: tuple[nn.Module, ...]) -> None:
        self._accelerator = accelerator
        self._models = models
        self._stack: ExitStack | None = None

    def __enter__(self) -> None:
        accelerator = self._accelerator
        if accelerator._preemption is not None:
            accelerator._preemption.before_micro_batch()
        due = accelerator.clock.tick(accelerator._key(self._models))
        if not due and not accelerator.clock.plugin.sync_each_batch:
            self._stack = ExitStack()
            for model in self._models:
                prepared = accelerator._models[accelerator._position(model)]
                self._stack.enter_context(accelerator.backend.no_sync(prepared))

    def __exit__(self, *exc: object) -> None:
        if self._stack is not None:
            self._stack.close()

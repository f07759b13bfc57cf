"""Counts of XLA's compilations, with a warning about late ones, because each change of shapes costs seconds."""

from collections.abc import Callable
from typing import final

from accel_state.logging import get_logger

_log = get_logger(__name__)


@final
class CompilationWatch:
    """Counts compilations at the end of steps and micro-batches, which are expected in the first few steps only.

    Compilations between these points (values that the user reads from the device) are not counted.

    Attributes:
        steps: optimizer steps seen.
        late: compilations after the first ``quiet_steps`` steps.
    """

    def __init__(self, quiet_steps: int) -> None:
        self.steps = 0
        self.late = 0
        self._quiet_steps = quiet_steps

    def end_step(self, end: Callable[[], None]) -> None:
        """Calls ``end``, which ends an optimizer step."""
        self.steps += 1
        self._watch(end, "optimizer step", self.steps)

    def end_micro_batch(self, end: Callable[[], None]) -> None:
        """Calls ``end``, which ends a micro-batch that no optimizer step follows yet."""
        self._watch(end, "a micro-batch of optimizer step", self.steps + 1)

    def _watch(self, end: Callable[[], None], what: str, step: int) -> None:
        before = compilations()
        end()
        now = compilations()
        new = now - before
        if new and step > self._quiet_steps:
            self.late += new
            _log.warning(
                "XLA compiled %d time(s) in %s %d (%d in all): something changes from step to step. Usual "
                "causes: batches of different shapes (pad them; even_batches=True fills the last one), Python numbers "
                "that change in the model, .item() between forward and step",
                new,
                what,
                step,
                now,
            )


def compilations() -> int:
    """Returns the number of computations that XLA has compiled in this process."""
    import torch_xla.debug.metrics as metrics

    data = metrics.metric_data("CompileTime")
    return 0 if data is None else int(data[0])

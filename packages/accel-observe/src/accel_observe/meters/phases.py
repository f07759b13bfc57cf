"""Time that a process spends in each phase."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import final

import torch
from torch import nn

from accel_observe.private import at_end_of_backward

DATA, COMPUTE, COMMUNICATION, SAVE = "data", "compute", "communication", "save"
PHASES = (DATA, COMPUTE, COMMUNICATION, SAVE)
"""Phases: waiting for a batch; computation and the rest of the loop; waiting for other ranks' gradients; saving."""


@final
class PhaseClock:
    """Seconds by phase. Exactly one phase is active at every moment, so the phases add up to the elapsed time.

    Args:
        now: the clock, in seconds.
    """

    __slots__ = ("_now", "_since", "phase", "seconds", "started")

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self.phase = COMPUTE
        self.started = self._since = now()

    def enter(self, phase: str, at: float | None = None) -> str:
        """Switches to ``phase``, now or as of ``at``; returns the previous phase."""
        moment = self._now() if at is None else max(at, self._since)
        before = self.phase
        self.seconds[before] += moment - self._since
        self._since, self.phase = moment, phase
        return before

    def read(self) -> dict[str, float]:
        """Seconds of every phase up to now."""
        self.enter(self.phase)
        return dict(self.seconds)

    def now(self) -> float:
        """The clock's time."""
        return self._now()

    @contextmanager
    def within(self, phase: str) -> Iterator[None]:
        """Counts the block as ``phase``."""
        before = self.enter(phase)
        try:
            yield
        finally:
            self.enter(before)


@final
class GradientWait:
    """Counts as communication the rest of a backward after this rank's last gradient is ready.

    By then this rank has computed everything, so the rest is waiting for other ranks: the communication that
    computation did not overlap. On an accelerator both continue after the call returns, so a meter has no hooks there.
    """

    #: Its hooks do not change gradients, so backends that refuse other hooks accept these.
    observes_gradients = True

    def __init__(self, clock: PhaseClock, models: Iterable[nn.Module]) -> None:
        self._clock = clock
        self._last: float | None = None
        self._handles = [
            parameter.register_post_accumulate_grad_hook(self._ready)
            for model in models
            for parameter in model.parameters()
            if parameter.requires_grad
        ]

    def _ready(self, _: torch.Tensor) -> None:
        if self._last is None:
            # Wrappers such as DDP queue their own end-of-backward callback later than this hook; queueing twice runs
            # after theirs.
            at_end_of_backward(lambda: at_end_of_backward(self._ended))
        self._last = self._clock.now()

    def _ended(self) -> None:
        assert self._last is not None
        before = self._clock.enter(COMMUNICATION, self._last)
        self._clock.enter(before)
        self._last = None

    def remove(self) -> None:
        """Removes the hooks."""
        for handle in self._handles:
            handle.remove()


def shares(seconds: Mapping[str, float]) -> dict[str, float]:
    """Each phase's fraction of the total, between 0 and 1."""
    total = sum(seconds.values())
    return {phase: spent / total if total > 0 else 0.0 for phase, spent in seconds.items()}

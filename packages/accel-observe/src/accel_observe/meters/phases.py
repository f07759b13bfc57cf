"""The time that a process spends in each of a few phases."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar, cast, final

import torch
from torch import nn

DATA, COMPUTE, COMMUNICATION, SAVE = "data", "compute", "communication", "save"
PHASES = (DATA, COMPUTE, COMMUNICATION, SAVE)
"""Waiting for a batch; computing, and whatever else the loop does; waiting for other ranks' gradients; being saved."""


@final
class PhaseClock:
    """Seconds by phase. At every moment one phase is on, so that they add up to the time that has passed.

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
        """The phase is ``phase`` from now on, or from ``at``; returns the one before."""
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
        """The block counts as ``phase``."""
        before = self.enter(phase)
        try:
            yield
        finally:
            self.enter(before)


@final
class GradientWait:
    """Counts as communication what a backward takes after this rank's last gradient is there.

    By then everything of its own is computed, so the rest is waiting for gradients of others: the part of the
    communication that computing did not hide. On an accelerator both go on after the call, and little is seen here.
    """

    #: Its hooks change no gradient, so backends that refuse hooks which do accept these.
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
            # What wraps the model queues the end of its communication later than this, so ours has to go behind it.
            _at_end_of_backward(lambda: _at_end_of_backward(self._ended))
        self._last = self._clock.now()

    def _ended(self) -> None:
        assert self._last is not None
        before = self._clock.enter(COMMUNICATION, self._last)
        self._clock.enter(before)
        self._last = None

    def remove(self) -> None:
        """Stops looking."""
        for handle in self._handles:
            handle.remove()


def _at_end_of_backward(call: Callable[[], None]) -> None:
    torch.autograd.Variable._execution_engine.queue_callback(call)


def shares(seconds: Mapping[str, float]) -> dict[str, float]:
    """Each phase's part of the whole, between 0 and 1."""
    total = sum(seconds.values())
    return {phase: spent / total if total > 0 else 0.0 for phase, spent in seconds.items()}


P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S")


def observed(kind: str) -> Callable[[Callable[Concatenate[S, P], R]], Callable[Concatenate[S, P], R]]:
    """Decorates a method of an Accelerator: its time counts as being saved, and the run log notes it as ``kind``."""

    def decorate(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
        @wraps(method)
        def timed(self: S, *args: P.args, **kwargs: P.kwargs) -> R:
            observer: Any = self
            started, clock = time.perf_counter(), observer._phases
            before = None if clock is None else clock.enter(SAVE)
            try:
                result = method(self, *args, **kwargs)
            finally:
                if before is not None:
                    clock.enter(before)
            observer.log_event(kind, path=str(result), seconds=time.perf_counter() - started)
            return result

        return cast(Callable[Concatenate[S, P], R], timed)

    return decorate

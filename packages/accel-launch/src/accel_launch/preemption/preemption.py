"""Preemption of a run: detected at once, saved at the same step on all ranks, resumable.

Ordinary steps need no communication. A thread detects preemption (a signal, a file, a check, another rank) and
publishes, in the store of the process group, the position up to which its own loop will go. All ranks stop at the
largest of these positions. The threads never wait for a loop, so the ranks agree even while a loop waits in a
collective for another, and the loops continue meanwhile.
"""

import contextlib
import logging
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, final

from accel_launch.preemption.exit_status import FAILED_MARK, PREEMPTED_STATUS
from accel_state.errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

_LOG = logging.getLogger(__name__)


DEFAULT_SIGNALS = ("SIGTERM", "SIGUSR1")
NEVER = 1 << 62
_PASS = 1 << 40
_IDLE, _HURRY = 0.5, 0.02
_AGREEMENT = 5.0
_END = object()


@final
@dataclass(frozen=True, slots=True)
class Notice:
    """Triggers of a preemption.

    ``check`` is called about every ``every`` seconds in a thread of the main process; a true result means preemption,
    and is the printed reason. The existence of ``file`` means preemption too.

    Raises:
        ConfigError: a name that is not a signal of this system, or an interval that is not positive.
    """

    signals: tuple[str, ...] = DEFAULT_SIGNALS
    file: str | os.PathLike[str] | None = None
    check: Callable[[], object] | None = None
    every: float = 5.0

    def __post_init__(self) -> None:
        unknown = [name for name in self.signals if not hasattr(signal, name) or not name.startswith("SIG")]
        if unknown:
            raise ConfigError(f"signals holds {unknown[0]!r}, which is no signal here; expected names like 'SIGTERM'")
        if self.every <= 0:
            raise ConfigError(f"every is {self.every!r}; it is the seconds between two checks, and must be positive")

    @property
    def numbers(self) -> tuple[int, ...]:
        """Numbers of the signals."""
        return tuple(int(getattr(signal, name)) for name in self.signals)

    def look(self) -> str | None:
        """Checks the file and calls the check; returns the reason for a preemption, or None."""
        if self.file is not None and Path(self.file).exists():
            return f"{os.fspath(self.file)} exists"
        told = None if self.check is None else self.check()
        return None if not told else told if isinstance(told, str) else "the preemption check said so"


@final
class StopConsensus:
    """Consensus on where to stop: each rank publishes the position up to which it goes, and all stop at the largest.

    Every operation returns at once; raises RuntimeError if the store is gone.
    """

    def __init__(self, store: "Store | None", rank: int, world_size: int) -> None:
        self._store = store
        self._rank = rank
        self._keys = [f"limit/{other}" for other in range(world_size)]
        self._own: int | None = None

    def call(self, reason: str) -> None:
        """Requests the limits of all ranks."""
        if self._store is not None:
            self._store.set("called", reason)

    def called(self) -> str | None:
        """The reason that some rank gave when it called; None if no rank has called."""
        if self._store is None or not self._store.check(["called"]):
            return None
        return self._store.get("called").decode()

    def promise(self, limit: int) -> None:
        """Publishes that this rank does not go past position ``limit`` before all ranks have published."""
        self._own = limit
        if self._store is not None:
            self._store.set(self._keys[self._rank], str(limit))

    def outcome(self) -> int | None:
        """The first position that no rank has passed, once all ranks have published; None before."""
        if self._store is None:
            return self._own
        if not self._store.check(self._keys):
            return None
        return max(map(int, self._store.multi_get(self._keys)))


@final
class Preemption:
    """Listens for preemption, and ends the loop at the position on which all ranks agreed.

    The loop reports *stop points*, between two batches, where all work so far is complete: before a prepared loader
    reads the next batch, or without one, where ``accumulate`` or otherwise ``backward`` begins. All ranks count them
    alike.

    Attributes:
        noticed: reason why this run must end, or None.
        position: stop points passed, counted from the start of the most recent pass of a loader.
    """

    def __init__(
        self, notice: Notice, consensus: StopConsensus, leave: Callable[[str], None], *, is_main: bool = True
    ) -> None:
        self.noticed: str | None = None
        self.position = 0
        self._notice = notice
        self._consensus = consensus
        self._leave = leave
        self._is_main = is_main
        self._limit = NEVER
        self._target: int | None = None
        self._decided = threading.Event()
        self._passes = 0
        self._accumulates = False
        self._backwards = 0
        self._restarts: list[tuple[Any, dict[str, Any], int]] = []
        self._leaving = False
        self._closed = False
        self._previous: dict[int, Any] = {}
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._reader, False)
        os.set_blocking(self._writer, False)
        self._thread = threading.Thread(target=self._watch, name="accel-preemption", daemon=True)
        forked = weakref.WeakMethod(self._forked)
        os.register_at_fork(after_in_child=lambda: (call := forked()) and call())

    # Called by the loop

    def before_batch(self) -> None:
        """A stop point: the loop has finished all work before it. Does not return if all ranks stop here."""
        self.position += 1
        if self.noticed is not None:
            self._stop_here()

    def before_micro_batch(self) -> None:
        """Called when ``accumulate`` begins; a stop point if there is no prepared loader."""
        self._accumulates = True
        if not self._passes:
            self.before_batch()

    def before_backward(self) -> None:
        """Called when ``backward`` begins; a stop point if there is neither a prepared loader nor ``accumulate``."""
        if not self._passes and not self._accumulates:
            self.before_batch()
        self._backwards += 1

    def reading(self, loader: Any, batches: Iterator[Any]) -> Iterator[Any]:
        """Yields ``batches`` of one pass of ``loader``, with a stop point before and after each is read.

        A batch that was read when the run stops was never delivered, and is read again after a resume.
        """
        self.position = (self.position // _PASS + 1) * _PASS
        self._passes += 1
        entry = (loader, loader.state_dict(), self._backwards)
        self._restarts.append(entry)
        try:
            while True:
                self.before_batch()
                batch = next(batches, _END)
                if self.noticed is not None:
                    self._stop_here()
                if batch is _END:
                    return
                yield batch
        finally:
            self._passes -= 1
            self._restarts.remove(entry)

    def rewind_evaluations(self) -> None:
        """Resets loaders to the start of a pass in which nothing was trained, because half an evaluation is useless."""
        for loader, start, backwards in self._restarts:
            if self._backwards and backwards == self._backwards:
                loader.load_state_dict(start)

    def _stop_here(self) -> None:
        """Ends the run if this is the agreed position; waits for the others' limits if this rank reached its own."""
        if self._leaving:
            raise SystemExit(PREEMPTED_STATUS)
        if self._target is None and self.position >= self._limit and not self._decided.wait(_AGREEMENT):
            _LOG.warning("no agreement on where to stop: another rank does not answer; going on")
            self._limit = NEVER
        if self._target is not None and self.position >= self._target:
            self.leave()

    def leave(self) -> None:
        """Runs the preemption action, and ends this process with ``PREEMPTED_STATUS``."""
        if not self._leaving:
            self._leaving = True
            self._leave(self.noticed or "asked to")
        raise SystemExit(PREEMPTED_STATUS)

    # Listening

    def start(self, *, replace: bool) -> None:
        """Begins to listen; ``replace`` also takes over signals that the program handles, and calls its handlers too.

        Outside the main thread Python allows no signal handlers, so signals are not observed there.
        """
        if threading.current_thread() is threading.main_thread():
            for number in self._notice.numbers:
                before = signal.getsignal(number)
                if before is signal.SIG_DFL or (replace and before is not signal.SIG_IGN):
                    self._previous[number] = signal.signal(number, self._on_signal)
            if self._previous:
                # Wakes the thread even while the main thread is in a collective.
                other = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
                if other != -1:
                    signal.set_wakeup_fd(other)
        self._thread.start()

    def close(self) -> None:
        """Stops listening and restores signal handlers; the other ranks need not wait for this one any more."""
        if self._closed:
            return
        self._closed = True
        self._restore_signals()
        with contextlib.suppress(OSError):
            os.write(self._writer, b"\0")
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(_AGREEMENT)
        if not self._thread.is_alive():
            os.close(self._reader)
            os.close(self._writer)

    def _forked(self) -> None:
        """Ends listening in a forked process, whose signals would otherwise be read by the parent from the pipe."""
        if not self._closed:
            self._closed = True
            self._restore_signals()
            os.close(self._reader)
            os.close(self._writer)

    def _restore_signals(self) -> None:
        if threading.current_thread() is threading.main_thread():
            for number, handler in self._previous.items():
                if signal.getsignal(number) == self._on_signal:
                    signal.signal(number, handler)
            if self._previous:
                other = signal.set_wakeup_fd(-1)
                if other not in (-1, self._writer):
                    signal.set_wakeup_fd(other)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._leaving:
            return  # the run is being saved; SIGKILL ends it at once
        if self._closed or _attempt_failed() or (self._target is None and self.position == 0):
            _end_by(number)  # there is nothing to save, or no process to save it with
        if self._target is not None:
            if self.position == self._target and _reads_here(frame):
                self.leave()
            return
        with contextlib.suppress(OSError):
            os.write(self._writer, bytes([number]))
        previous = self._previous.get(number)
        if callable(previous):
            previous(number, frame)

    def _watch(self) -> None:
        """Thread that detects a preemption, publishes this rank's limit, and sets the loop's stop position."""
        looked = time.monotonic()
        try:
            while not self._closed and not self._leaving and self._target is None:
                heard = self._heard(_IDLE if self.noticed is None else _HURRY)
                if self.noticed is None:
                    reason = heard or self._consensus.called()
                    if reason is None and self._is_main and time.monotonic() - looked >= self._notice.every:
                        reason, looked = self._look(), time.monotonic()
                    if reason is not None and not self._closed:
                        self._announce(reason, own=heard is not None)
                else:
                    self._settle()
            if self._closed:
                self._consensus.promise(NEVER)
        except RuntimeError:
            return  # the store has gone with the process that held it, and so has the run

    def _look(self) -> str | None:
        try:
            return self._notice.look()
        except Exception:
            _LOG.exception("the preemption check failed; it is asked again in %g s", self._notice.every)
            return None

    def _heard(self, patience: float) -> str | None:
        ready = wait([self._reader], min(patience, self._notice.every))
        numbers = set(os.read(self._reader, 64)) & set(self._previous) if ready else set()
        if numbers and _attempt_failed():
            os._exit(128 + min(numbers))
        return f"received {signal.Signals(min(numbers)).name}" if numbers else None

    def _announce(self, reason: str, *, own: bool) -> None:
        # The limit is set before the notice, and the notice before the loop can pass another stop point unseen.
        self._limit = 0
        self.noticed = reason
        self._limit = self.position if self._is_reading() else self.position + 1
        self._consensus.call(reason)
        self._consensus.promise(self._limit)

    def _settle(self) -> None:
        target = self._consensus.outcome()
        if target is None:
            return
        self._target = target
        self._decided.set()
        if self.position == target and self._previous and self._is_reading():
            # Interrupts the main thread's wait for data.
            signal.pthread_kill(_main_ident(), next(iter(self._previous)))

    def _is_reading(self) -> bool:
        """Whether the loop waits for a batch and can be stopped there, since no other rank takes part in reading."""
        frame = sys._current_frames().get(_main_ident())
        return bool(self._restarts) and self._restarts[-1][0].reads_alone and _reads_here(frame)


def _main_ident() -> int:
    ident = threading.main_thread().ident
    assert ident is not None
    return ident


def _reads_here(frame: FrameType | None) -> bool:
    """Whether ``frame`` is inside a call that ``Preemption.reading`` has made, before its next check for a notice."""
    inner = frame
    while frame is not None:
        if frame.f_code is Preemption.reading.__code__:
            return frame is not inner
        frame = frame.f_back
    return False


def _attempt_failed() -> bool:
    """Whether the launcher ends this attempt because another process failed; reads its ``TORCHELASTIC_ERROR_FILE``."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    return path is not None and (Path(path).parent / FAILED_MARK).exists()


def _end_by(number: int) -> None:
    """Ends this process as the signal would without a handler."""
    signal.signal(number, signal.SIG_DFL)
    signal.raise_signal(number)

"""Delivery queue of one tracker, emptied by a thread, so that trackers never delay or end a run."""

import atexit
import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from accel_observe.tracking.base import Continuation, GeneralTracker
from accel_observe.tracking.spool import Note, Spool, SpooledCall
from accel_observe.tracking.values import flatten, plain

_LOG = logging.getLogger("accel_observe.tracking")
_BATCH, _LAST_ATTEMPTS = 256, 3
STATE, MARKS, HELD = "state", "marks", "held"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class QueueOptions:
    """Options of the delivery to trackers.

    Attributes:
        interval: seconds between two deliveries. If the process is killed, undelivered entries are in its checkpoint.
        patience: seconds that the end of training waits for a tracker.
        attempts: delivery attempts of one entry before it is skipped in favour of those behind it.
        pause: longest time in seconds between two attempts.
        held: entries kept in memory for an unreachable tracker; older ones are moved to a file.
        limit: entries kept for a tracker whose calls do not return; later entries are dropped.
    """

    interval: float = 0.5
    patience: float = 30.0
    attempts: int = 5
    pause: float = 30.0
    held: int = 2_000
    limit: int = 100_000


@final
class DeliveryQueue:
    """Delivers entries to one tracker in order, on a thread that starts with the first entry.

    A failed delivery is repeated after a growing pause; meanwhile entries wait, first in memory, then in the spool. An
    entry that the tracker rejects (``TypeError``, ``ValueError``) is dropped at once. Problems are logged once, and
    once more when they are over.

    The identity of the tracker's run is written beside the spool as soon as it is known, because a run may resume from
    a checkpoint that was saved before. ``folder`` returns the run's current folder; None: nothing is written.

    Attributes:
        name: the tracker's name.
        key: its name in checkpoints and files, which differs for the ``number``-th tracker of one name.
    """

    def __init__(
        self,
        tracker: GeneralTracker,
        options: QueueOptions,
        folder: Callable[[], Path | None] = lambda: None,
        *,
        number: int = 1,
    ) -> None:
        self.tracker = tracker
        self.name = str(tracker.name)
        self.key = self.name if number == 1 else f"{self.name}-{number}"
        self.options = options
        self.configuration: dict[str, Any] | None = None
        self.problem: Exception | None = None
        self._folder = folder
        self._held: deque[SpooledCall] = deque()
        self._marks: dict[str, int] = {}
        self._skip: Mapping[str, int] = {}
        self._resumed: Continuation | None = None
        self._state: dict[str, Any] = {}
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._started = threading.Event()
        self._failed_once = threading.Event()
        self._ending = False
        self._thread: threading.Thread | None = None
        self._failures = 0
        self._next_attempt = 0.0
        self._told = False
        self._lost = 0
        self._refused = 0
        self._spooled = False

    # ------------------------------------------------------------------------------------ called by the training loop

    def put(self, entry: SpooledCall) -> None:
        """Queues an entry; takes a microsecond or two."""
        if len(self._held) >= self.options.limit:
            self._lost += 1
            return
        self._held.append(entry)
        if self._thread is None:
            self._open()

    def ensure_started(self, seconds: float) -> bool:
        """Starts the tracker now and waits until it has started; returns False if it fails or takes longer."""
        if self._thread is None:
            self._open()
        self._wake.set()
        until = time.monotonic() + seconds
        while not self._started.wait(0.02):
            if self._failed_once.is_set() or time.monotonic() > until:
                return False
        return True

    @property
    def used(self) -> bool:
        """Whether the tracker has received an entry, in this process or in the run that it resumes."""
        return self._thread is not None or self._resumed is not None

    def state_dict(self) -> dict[str, Any]:
        """Identity of the run, last delivered steps, and undelivered entries; JSON."""
        with self._lock:
            held = list(self._held)
            marks, state = dict(self._marks), dict(self._state)
        lines = [line for entry in held if (line := entry.to_json()) is not None]
        return {STATE: state, MARKS: marks, HELD: lines}

    def resume(self, saved: Mapping[str, Any] | None, logged: Mapping[str, int]) -> None:
        """Resumes a saved run. ``logged``: by name, the last step that had been logged at the save.

        ``saved`` None: the tracker had received nothing by then; if its run was begun afterwards, that run is resumed.
        """
        note = self._note()
        noted = None if note is None else self._guarded(note.read, None)
        if saved is None and noted is None:
            return
        saved = {STATE: {}, MARKS: {}, HELD: []} if saved is None else saved
        if self._thread is not None:
            self.finish()
            self._reset()
        self._state, self._marks = dict(saved[STATE] or noted or {}), dict(saved[MARKS])
        self._resumed = Continuation(dict(self._state), dict(self._marks))
        self._fetch_spool()
        waiting = [*self._held, *map(SpooledCall.from_json, saved[HELD])]
        self._held.clear()
        self._held.extend(entry for entry in waiting if _was_logged(entry, logged))

    def hurry(self) -> None:
        """Asks the thread to finish, without waiting for it."""
        if self._thread is not None:
            self._ending = True
            self._wake.set()

    def finish(self) -> None:
        """Delivers the remaining entries and closes the tracker, within ``patience``; then spools what is left."""
        if self._thread is None:
            return
        self.hurry()
        self._thread.join(self.options.patience)
        hanging = self._thread.is_alive()
        self._thread = None
        if hanging:
            self.problem = self.problem or TimeoutError(f"no answer in {self.options.patience:g} s")
        if self._held:
            self._write_spool(len(self._held))
        if self._spooled or self._lost or self._refused or hanging:
            self._say_what_is_left()

    def _say_what_is_left(self) -> None:
        spool = self._spool()
        told = [f"tracker {self.name} ended with trouble ({type(self.problem).__name__}: {self.problem})"]
        if self._spooled and spool is not None:
            told.append(f"what it could not be given waits in {spool.path}")
        if self._lost:
            told.append(f"{self._lost} entries are lost to it")
        if self._refused:
            told.append(f"it refused {self._refused} entries")
        _LOG.warning("; ".join(told))

    # -------------------------------------------------------------------------------------------------- on the thread

    def _open(self) -> None:
        self._thread = threading.Thread(target=self._run, name=f"accel-tracker-{self.name}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._ending:
            self._wake.wait(self.options.interval)
            self._wake.clear()
            if not self._ending and time.monotonic() >= self._next_attempt:
                self._work()
        for _ in range(_LAST_ATTEMPTS):
            if self._left_behind() or self._work():
                break
            time.sleep(min(self.options.interval, self.options.pause))
        # Closes the tracker even if late, unless a later thread uses it by now.
        if self._started.is_set() and self._thread in (None, threading.current_thread()):
            try:
                self.tracker.finish()
            except Exception as error:
                if not self._left_behind():
                    self._trouble(error)

    def _left_behind(self) -> bool:
        """Whether ``finish`` abandoned this thread and spooled its entries, which must stay in the spool."""
        return self._thread is not threading.current_thread()

    def _work(self) -> bool:
        """Delivers all entries, oldest first; returns False if some are left."""
        try:
            if not self._started.is_set():
                self._begin()
            if self._spooled:
                self._fetch_spool()
            if self._failures >= self.options.attempts and len(self._held) > 1:
                self._pass_over_first()
            while self._held:
                try:
                    self._deliver_batch(min(len(self._held), _BATCH))
                except (TypeError, ValueError) as error:
                    self._set_aside_first(error)
        except Exception as error:
            if not self._left_behind():
                self._trouble(error)
            return False
        if self._failures:
            _LOG.warning("tracker %s works again", self.name)
            self._failures, self._next_attempt, self._told = 0, 0.0, False
        return True

    def _set_aside_first(self, error: Exception) -> None:
        """Drops the first entry, which the tracker rejects, so that repeating it is useless."""
        if self._left_behind():
            raise error
        with self._lock:
            self._held.popleft()
        self._refused += 1
        self._tell(error, "refused a value")

    def _begin(self) -> None:
        if self._resumed is not None:
            self.tracker.resume(self._resumed)
        folder = self._folder()
        if folder is not None:
            self.tracker.enter_run(folder.name)
        self.tracker.start()
        call_at_exit(self.finish)  # before the library closes its run at exit, for which start has registered
        with self._lock:
            self._state = self.tracker.state_dict()
        note = self._note()
        if note is not None and self._state:
            self._guarded(lambda: note.write(self._state), None)
        if self.configuration is not None:
            try:
                self.tracker.store_init_configuration(self.configuration)
            except Exception as error:
                _LOG.warning("tracker %s did not take the configuration: %s", self.name, error)
        if self._resumed is not None:
            self._skip = self.tracker.marks()
        self._started.set()

    def _deliver_batch(self, count: int) -> None:
        """Delivers entries, and flushes the tracker before they count as delivered."""
        done: list[SpooledCall] = []
        try:
            for position in range(count):
                self._deliver(self._held[position])
                done.append(self._held[position])
        finally:
            if done and not self._left_behind():
                self.tracker.flush()
                with self._lock:
                    for entry in done:
                        self._held.popleft()
                        self._mark(entry)

    def _deliver(self, entry: SpooledCall) -> None:
        if entry.method != "log":
            getattr(self.tracker, entry.method)(entry.values, step=entry.step, **entry.kwargs)
            return
        values = plain(entry.values)
        if self._skip and entry.step is not None:
            step = entry.step
            values = {name: value for name, value in flatten(values) if step > self._skip.get(name, step - 1)}
        if values:
            self.tracker.log(values, step=entry.step, **entry.kwargs)

    def _pass_over_first(self) -> None:
        """Drops the first entry if the second can be delivered: then the first is the reason for the failures."""
        second = self._held[1]
        self._deliver(second)
        self.tracker.flush()
        with self._lock:
            self._held.popleft()
            self._held.popleft()
            self._mark(second)
        self._refused += 1
        self._failures = 0

    def _fetch_spool(self) -> None:
        spool = self._spool()
        waiting = [] if spool is None else self._guarded(spool.take, [])
        with self._lock:
            self._held.extendleft(reversed(waiting))
        self._spooled = False

    def _mark(self, entry: SpooledCall) -> None:
        if entry.method == "log" and entry.step is not None:
            for name, _ in flatten(entry.values):
                self._marks[name] = max(entry.step, self._marks.get(name, entry.step))

    def _trouble(self, error: Exception) -> None:
        self._failures += 1
        self._next_attempt = time.monotonic() + min(self.options.pause, self.options.interval * 2**self._failures)
        self._tell(error, "cannot be reached; it is tried again, and training goes on")
        too_many = len(self._held) - self.options.held
        if too_many > 0:
            with self._lock:
                self._write_spool(too_many)
        self._failed_once.set()

    def _tell(self, error: Exception, what: str) -> None:
        self.problem = error
        if not self._told:
            self._told = True
            _LOG.warning("tracker %s %s: %s: %s", self.name, what, type(error).__name__, error)

    def _write_spool(self, count: int) -> None:
        """Moves the oldest entries to the spool; entries that cannot be written are lost."""
        spool = self._spool()
        entries = [self._held.popleft() for _ in range(min(count, len(self._held)))]
        written = 0 if spool is None else int(self._guarded(lambda: spool.append(entries), 0))
        self._spooled = self._spooled or written > 0
        self._lost += len(entries) - written

    def _spool(self) -> Spool | None:
        folder = self._folder()
        return None if folder is None else Spool(folder / f"undelivered-{self.key}.jsonl")

    def _note(self) -> Note | None:
        folder = self._folder()
        return None if folder is None else Note(folder / f"tracker-{self.key}.json")

    def _guarded(self, action: Callable[[], Any], otherwise: Any) -> Any:
        try:
            return action()
        except OSError as error:
            _LOG.debug("tracker %s: %s", self.name, error)
            return otherwise

    def _reset(self) -> None:
        self._held.clear()
        self._started.clear()
        self._failed_once.clear()
        self._wake.clear()
        self._skip, self._ending = {}, False
        self._failures, self._next_attempt, self._told = 0, 0.0, False
        self._lost, self._refused, self._spooled = 0, 0, False


def _was_logged(entry: SpooledCall, logged: Mapping[str, int]) -> bool:
    """Whether an entry had been logged when the checkpoint was saved; otherwise the resumed run logs it again."""
    if entry.step is None:
        return True
    names = entry.values if isinstance(entry.values, dict) else {}
    return all(entry.step <= logged.get(name, -1) for name in names)


def call_at_exit(finish: Callable[[], None]) -> None:
    """Calls a method at the end of the process, unless its object is gone by then: what is queued is delivered."""
    method = weakref.WeakMethod(finish)

    def call() -> None:
        if (found := method()) is not None:
            found()

    atexit.register(call)

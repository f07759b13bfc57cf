"""Failure relay: an error of one rank's reading is reported to the ranks that read the same loader."""

import _thread
import logging
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, final

from accel_state.errors import DataError
from accel_state.watchdog.decorator import troubled, untroubled

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

    from accel_data.map.index_agreement import IndexTrail

_LONGEST_PAUSE = 20
"""Upper limit of intervals between two comparisons of indices."""
_LOG = logging.getLogger(__name__)
_INTERVAL = 0.5
"""Seconds between two checks of a rank for another rank's failure."""
_PATIENCE = 10.0
"""Seconds for which a failed rank waits until the others have read its report: the store may end with this rank."""
_ANSWERS_WITHIN = 5.0
"""Seconds that the end of the interpreter waits for a request, whose server may be stopped."""


def alarm() -> "Alarm | None":
    """Creates the alarm of a loader that is created now; None without other processes.

    Ranks create their loaders in the same order, so the n-th alarm of one rank corresponds to the n-th of any other.
    """
    from accel_state.private import default_store
    from accel_state.process_group.group import default_group

    group = default_group()
    if group is None or group.size() == 1:
        return None
    shared: Any = default_store()
    try:
        store = shared.clone()  # with its own connection, for its own thread
    except RuntimeError:
        return None  # the store of a fake group has no other processes
    number = store.add(f"accel-data/loaders/{group.rank()}", 1)
    return Alarm(ThreadStore(store), f"accel-data/{number}", group.rank(), group.size())


@final
class Alarm:
    """Failure reports between the ranks of one loader through the rendezvous store, which works if collectives do not.

    No rank waits for another one: each polls the store in a thread. Reports are also passed to the watchdog, which uses
    them to explain failed collectives (``accel_state.watchdog``).
    """

    def __init__(self, store: "ThreadStore", prefix: str, rank: int, world_size: int) -> None:
        self._store, self._prefix, self._rank, self._others = store, prefix, rank, world_size - 1
        self._passes = 0

    def watch(self, trail: "IndexTrail | None" = None) -> "Watch":
        """Starts to poll during the pass that begins now, the n-th of this loader on any rank.

        Meanwhile the indices of ``trail`` are compared with those of the other ranks.
        """
        self._passes += 1
        keys = (f"{self._prefix}/{self._passes}", f"{self._prefix}/{self._passes + 1}")
        return Watch(self._store, keys, (self._rank, self._others), trail)


@final
class Watch:
    """Failure reports during one pass of one rank.

    Attributes:
        heard: report of another rank; None if there is none.
    """

    def __init__(
        self, store: "ThreadStore", keys: tuple[str, str], place: tuple[int, int], trail: "IndexTrail | None"
    ) -> None:
        """``keys`` are the keys of this pass and the next one; ``place`` is the rank and the number of other ranks."""
        self._store, (self._key, self._next_key) = store, keys
        self._rank, self._others = place
        self._trail = trail
        self._over = threading.Event()
        self.heard: str | None = None
        untroubled()
        # Not a ``Thread``, whose start waits until it runs: about 10 ms per pass if processes outnumber cores.
        _thread.start_new_thread(self._listen, ())

    def _listen(self) -> None:
        try:
            compared = pause = 1
            while not self._store.check([self._key]):
                if self._over.wait(_INTERVAL):
                    self._compare_to_the_end()
                    return
                compared -= 1
                if self._trail is not None and not compared:
                    self._differ(self._trail.compare(self._store), self._key)
                    # Soon at first, because most samplers that differ do so from the start.
                    compared = pause = min(2 * pause, _LONGEST_PAUSE)
            rank, _, text = self._store.get(self._key).decode().partition(" ")
            if not self._over.is_set():
                # Logged now, because the step may wait for the failed rank in an operation that reports no reason.
                _LOG.error("rank %d stops reading: %s", self._rank, text)
                troubled(int(rank), text)
                self.heard = text
            self._store.add(f"{self._key}/heard", 1)
        except (RuntimeError, OSError):
            return  # the store ended with the rank that served it

    def _compare_to_the_end(self) -> None:
        """Compares all indices of a finished pass. Ranks that differ report it in the log and in the next pass."""
        trail = self._trail
        if trail is None:
            return
        until = time.monotonic() + 2 * _LONGEST_PAUSE * _INTERVAL
        while True:
            settled = trail.is_reference or trail.is_settled(self._store)
            difference = trail.compare(self._store, closed=True)
            # A rank may still be in this pass, waiting for this rank in a step for which this rank has no batch.
            self._differ(difference, self._key, self._next_key)
            if difference is not None or settled or time.monotonic() > until:
                return
            time.sleep(_INTERVAL / 5)

    def _differ(self, difference: str | None, *keys: str) -> None:
        """Reports a difference to all ranks that poll ``keys``, including this one."""
        if difference is not None:
            _LOG.error("%s", difference)
            for key in keys:
                self._store.set(key, f"{self._rank} {difference}")

    def said(self) -> str | None:
        """Returns the report of another rank; None if there is none."""
        return self.heard

    def heeding(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yields the batches; raises ``DataError`` once another rank has failed."""
        for batch in batches:
            if self.heard is not None:
                raise stopped(self.heard)
            yield batch

    def tell(self, error: BaseException) -> None:
        """Reports an error of this rank, and waits for a limited time until the other ranks have read the report."""
        self._over.set()
        said = f"rank {self._rank} could not read its next batch: {type(error).__name__}: {error}"
        try:
            self._store.set(self._key, f"{self._rank} {said}")
            until = time.monotonic() + _PATIENCE
            while time.monotonic() < until and self._store.add(f"{self._key}/heard", 0) < self._others:
                time.sleep(_INTERVAL / 10)
        except (RuntimeError, OSError):
            return

    def close(self) -> None:
        """Ends the polling: the pass is over."""
        self._over.set()


def stopped(trouble: str) -> DataError:
    """Returns the error that a rank raises after another rank's report."""
    return DataError(f"this rank stops because another cannot go on: {trouble}")


@final
class ThreadStore:
    """Store of a daemon thread: once the interpreter ends, requests raise RuntimeError, as those of a lost store do.

    A request releases the interpreter's lock. If the interpreter ends meanwhile, taking the lock again ends the thread
    inside C++ code that must not be left that way, and the process is aborted (SIGABRT) after a successful run.
    """

    def __init__(self, store: "Store") -> None:
        self._store = store
        self._gate = _Gate()
        weakref.finalize(self, self._gate.close)  # also called at the end of the interpreter

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys are set."""
        with self._gate:
            return self._store.check([*keys])

    def get(self, key: str) -> bytes:
        """Returns the value of a key that is set."""
        with self._gate:
            return self._store.get(key)

    def set(self, key: str, value: str) -> None:
        """Sets a key; bytes are stored as they are."""
        with self._gate:
            self._store.set(key, value)

    def add(self, key: str, amount: int) -> int:
        """Adds to a number, 0 before the first call, and returns it."""
        with self._gate:
            return self._store.add(key, amount)

    def delete_key(self, key: str) -> bool:
        """Removes a key; returns whether it was set."""
        with self._gate:
            return self._store.delete_key(key)


@final
class _Gate:
    """Lets one request through at a time, and none after ``close``."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._closed = False

    def __enter__(self) -> None:
        self._lock.acquire()
        if self._closed:
            self._lock.release()
            raise RuntimeError("the interpreter ends")

    def __exit__(self, *error: object) -> None:
        self._lock.release()

    def close(self) -> None:
        self._closed = True
        if self._lock.acquire(timeout=_ANSWERS_WITHIN):
            self._lock.release()

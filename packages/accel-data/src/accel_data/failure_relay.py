"""Failures of one rank's reading, made known to the ranks that read the same loader."""

import _thread
import logging
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, final

from accel_state.errors import DataError
from accel_state.watchdog.decorator import troubled, untroubled

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

    from accel_data.map.index_agreement import IndexTrail

_LONGEST_PAUSE = 20
"""Intervals between two comparisons of indices, at most."""
_LOG = logging.getLogger(__name__)
_INTERVAL = 0.5
"""Seconds between two looks of a rank whether another one has failed."""
_PATIENCE = 10.0
"""Seconds a rank that failed stays for the others to hear of it: the store may be gone with it."""


def alarm() -> "Alarm | None":
    """The alarm of a loader made now; None without other processes.

    Ranks make their loaders in the same order, so that the n-th alarm of one belongs with the n-th of any other.
    """
    import torch.distributed as dist

    from accel_state.process_group.group import default_group

    group = default_group()
    if group is None or group.size() == 1:
        return None
    shared: Any = dist.distributed_c10d._get_default_store()
    try:
        store = shared.clone()  # with a connection of its own, for a thread of its own
    except RuntimeError:
        return None  # the store of a pretended group: there is nobody to tell
    number = store.add(f"accel-data/loaders/{group.rank()}", 1)
    return Alarm(store, f"accel-data/{number}", group.rank(), group.size())


@final
class Alarm:
    """Messages between the ranks of one loader through the store they met in, which works when nothing else does.

    No rank waits for another in it: each looks now and then, beside its step. What is heard is also told to those who
    explain why an operation between ranks failed (``accel_state.watchdog``).
    """

    def __init__(self, store: "Store", prefix: str, rank: int, world_size: int) -> None:
        self._store, self._prefix, self._rank, self._others = store, prefix, rank, world_size - 1
        self._passes = 0

    def watch(self, trail: "IndexTrail | None" = None) -> "Watch":
        """Listens during the pass that begins now, the n-th of this loader on any rank.

        The indices of ``trail`` are compared with those of the other ranks meanwhile.
        """
        self._passes += 1
        keys = (f"{self._prefix}/{self._passes}", f"{self._prefix}/{self._passes + 1}")
        return Watch(self._store, keys, (self._rank, self._others), trail)


@final
class Watch:
    """One pass of one rank.

    Attributes:
        heard: what another rank has said; None as long as all is well.
    """

    def __init__(
        self, store: "Store", keys: tuple[str, str], place: tuple[int, int], trail: "IndexTrail | None"
    ) -> None:
        """``keys`` are those of this pass and the next one's, ``place`` is the rank and how many others there are."""
        self._store, (self._key, self._next_key) = store, keys
        self._rank, self._others = place
        self._trail = trail
        self._over = threading.Event()
        self.heard: str | None = None
        untroubled()
        # A ``Thread`` is waited for until it runs: where processes outnumber cores, some 10 ms of every pass.
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
                # The step may wait for the rank that failed, in an operation that nobody else can say more about.
                _LOG.error("rank %d stops reading: %s", self._rank, text)
                troubled(int(rank), text)
                self.heard = text
            self._store.add(f"{self._key}/heard", 1)
        except (RuntimeError, OSError):
            return  # the store went with the rank that kept it

    def _compare_to_the_end(self) -> None:
        """Compares all indices of a pass that is over. Ranks that differ say so in the log, and in the next pass."""
        trail = self._trail
        if trail is None:
            return
        until = time.monotonic() + 2 * _LONGEST_PAUSE * _INTERVAL
        while True:
            settled = trail.is_reference or trail.is_settled(self._store)
            difference = trail.compare(self._store, closed=True)
            # A rank may still be in this pass, and wait for this one in a step that this one has no batch for.
            self._differ(difference, self._key, self._next_key)
            if difference is not None or settled or time.monotonic() > until:
                return
            time.sleep(_INTERVAL / 5)

    def _differ(self, difference: str | None, *keys: str) -> None:
        """Tells all ranks, this one too, that listen at ``keys``."""
        if difference is not None:
            _LOG.error("%s", difference)
            for key in keys:
                self._store.set(key, f"{self._rank} {difference}")

    def said(self) -> str | None:
        """What another rank has said; None as long as all is well."""
        return self.heard

    def heeding(self, batches: Iterator[Any]) -> Iterator[Any]:
        """The batches, until another rank has failed; raises ``DataError`` then."""
        for batch in batches:
            if self.heard is not None:
                raise stopped(self.heard)
            yield batch

    def tell(self, error: BaseException) -> None:
        """Says what went wrong here, and stays until the others have heard it, or for a moment."""
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
        """The pass is over."""
        self._over.set()


def stopped(trouble: str) -> DataError:
    """What a rank raises that has heard of another's trouble."""
    return DataError(f"this rank stops because another cannot go on: {trouble}")

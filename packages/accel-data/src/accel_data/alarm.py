"""Failures of one rank's reading, made known to the ranks that read the same loader."""

import _thread
import logging
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, final

from accel_state.doctor.active import troubled, untroubled
from accel_state.errors import DataError

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

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

    from accel_state.group import default_group

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
    explain why an operation between ranks failed (``accel_state.doctor``).
    """

    def __init__(self, store: "Store", prefix: str, rank: int, world_size: int) -> None:
        self._store, self._prefix, self._rank, self._others = store, prefix, rank, world_size - 1
        self._passes = 0

    def watch(self) -> "Watch":
        """Listens during the pass that begins now, the n-th of this loader on any rank."""
        self._passes += 1
        return Watch(self._store, f"{self._prefix}/{self._passes}", (self._rank, self._others))


@final
class Watch:
    """One pass of one rank.

    Attributes:
        heard: what another rank has said; None as long as all is well.
    """

    def __init__(self, store: "Store", key: str, place: tuple[int, int]) -> None:
        self._store, self._key = store, key
        self._rank, self._others = place
        self._over = threading.Event()
        self.heard: str | None = None
        untroubled()
        # A ``Thread`` is waited for until it runs: where processes outnumber cores, some 10 ms of every pass.
        _thread.start_new_thread(self._listen, ())

    def _listen(self) -> None:
        try:
            while not self._store.check([self._key]):
                if self._over.wait(_INTERVAL):
                    return
            rank, _, text = self._store.get(self._key).decode().partition(" ")
            if not self._over.is_set():
                # The step may wait for the rank that failed, in an operation that nobody else can say more about.
                _LOG.error("rank %d stops reading: %s", self._rank, text)
                troubled(int(rank), text)
                self.heard = text
            self._store.add(f"{self._key}/heard", 1)
        except (RuntimeError, OSError):
            return  # the store went with the rank that kept it

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

"""Check that a user's sampler yields the same indices on all ranks, without blocking the step.

Each rank keeps a running digest of the indices of every round (one step of all ranks). From time to time the reference
rank publishes its latest digests in the rendezvous store, and the others compare theirs with them.
"""

import struct
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, final
from zlib import crc32

from accel_data.order.cursor import Cursor

if TYPE_CHECKING:
    from accel_data.failure_relay import ThreadStore

_PUBLISHED = 1024
"""Number of digests, of the latest rounds, that are published at a time; 4 bytes each."""
_KEPT = 1 << 16
"""Number of digests that a rank keeps for comparison with a reference that is behind it."""
_PASSES_KEPT = 4
_HEADER = struct.Struct("<QQ??")


@final
@dataclass(slots=True)
class IndexCheck:
    """Index check of one loader, created when the ranks agreed on its seed.

    Attributes:
        name: name of the loader, equal on all ranks and unique.
        rank: rank of this process.
        reference: rank whose digests the others compare with theirs.
        sampler: class of the sampler that is checked.
    """

    name: str
    rank: int
    reference: int
    sampler: str
    _passes: dict[Cursor, int] = field(default_factory=dict)
    _keys: list[str] = field(default_factory=list)

    def trail(self, start: Cursor) -> "IndexTrail":
        """Creates the digests of a pass from ``start``; every rank has begun the same number of passes there."""
        number = self._passes[start] = self._passes.get(start, 0) + 1
        return IndexTrail(self, start, f"accel-data/indices/{self.name}/{start.epoch}.{start.samples}.{number}")

    def forget(self, store: "ThreadStore", key: str) -> None:
        """Deletes published digests of old passes; ``key`` is that of a current one."""
        if key not in self._keys:
            self._keys.append(key)
        while len(self._keys) > _PASSES_KEPT:
            store.delete_key(self._keys.pop(0))


@final
class IndexTrail:
    """Running digests of one pass on one rank, by round.

    The reading thread calls ``add`` and sets ``complete``; the watching thread calls ``compare``.

    Attributes:
        complete: whether the sampler has ended.
    """

    def __init__(self, check: IndexCheck, start: Cursor, key: str) -> None:
        self._check, self._start, self._key = check, start, key
        self._digest = 0
        self._digests = array("I")
        self._dropped = 0
        self._agreed = 0
        self.complete = False

    def add(self, batches: Iterable[Sequence[Any]]) -> None:
        """Adds the index batches of the next round to the digest."""
        digest = self._digest
        for batch in batches:
            digest = crc32(_bytes_of(batch), crc32(len(batch).to_bytes(8, "little"), digest))
        self._digest = digest
        self._digests.append(digest)

    def compare(self, store: "ThreadStore", *, closed: bool = False) -> str | None:
        """Publishes the digests (reference) or compares them with published ones; ``closed``: this rank's pass is over.

        Returns a description of the first difference from the reference; None if none is known yet.
        """
        if self.is_reference:
            self._check.forget(store, self._key)
            store.set(self._key, self._published(closed))  # type: ignore[arg-type]  # bytes are stored as they are
            return None
        if not store.check([self._key]):
            return None
        return self._difference(bytes(store.get(self._key)), closed)

    @property
    def is_reference(self) -> bool:
        """Whether the other ranks compare their digests with this rank's."""
        return self._check.rank == self._check.reference

    def is_settled(self, store: "ThreadStore") -> bool:
        """Whether the reference has published its last digests of this pass."""
        if not store.check([self._key]):
            return False
        closed: bool = _HEADER.unpack_from(store.get(self._key))[2]
        return closed

    def _published(self, closed: bool) -> bytes:
        complete, digests = self.complete, self._digests
        count = self._dropped + len(digests)
        latest = digests[-_PUBLISHED:]
        self._keep(_PUBLISHED)
        return _HEADER.pack(count, count - len(latest), closed, complete) + latest.tobytes()

    def _keep(self, number: int) -> None:
        surplus = len(self._digests) - number
        if surplus > 0:
            del self._digests[:surplus]
            self._dropped += surplus

    def _difference(self, published: bytes, closed: bool) -> str | None:
        complete, count = self.complete, self._dropped + len(self._digests)
        their_count, their_first, they_closed, they_complete = _HEADER.unpack_from(published)
        theirs = array("I", published[_HEADER.size :])
        first, last = max(self._dropped, their_first), min(count, their_count)
        for number in range(first, last):
            if self._digests[number - self._dropped] != theirs[number - their_first]:
                exact = number > first or number == self._agreed
                return self._told(f"step {number + 1}" if exact else f"step {number + 1} or one before it")
        if (complete and closed and their_count > count) or (they_complete and they_closed and count > their_count):
            return self._told(f"step {last + 1}, because it has {count} steps and {their_count} are known there")
        if last > self._agreed and first <= last:
            self._agreed = last
            self._keep(max(count - last, 1))
        self._keep(_KEPT)
        return None

    def _told(self, step: str) -> str:
        check, start = self._check, self._start
        begun = f" (counted from sample {start.samples})" if start.samples else ""
        return (
            f"the {check.sampler} of rank {check.rank} gave other indices than that of rank {check.reference} in epoch "
            f"{start.epoch}, from {step} on{begun}. A sampler has to give the same indices on every rank: let it draw "
            "from its attribute generator, from the global generators (they are seeded for it), or by its set_epoch"
        )


def _bytes_of(indices: Sequence[Any]) -> "bytes | array[int]":
    """Returns bytes for the digest, equal on all ranks for equal indices; empty for keys of unknown types."""
    try:
        return array("q", indices)
    except (TypeError, OverflowError):
        return repr(indices).encode() if all(map(_is_plain, indices)) else b""


def _is_plain(key: Any) -> bool:
    if type(key) is tuple:
        return all(map(_is_plain, key))
    return type(key) in (str, int, float, bytes, bool)

"""The position from which each reader of a stream continues after a resume."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, final

from accel_data.cursor import Cursor
from accel_data.iterable_left import Left
from accel_data.iterable_reader import Snapshot, Start
from accel_data.iterable_traits import Mode
from accel_data.source import Json
from accel_state.errors import DataStateError

KIND_KEY, KIND = "kind", "stream"
MODE_KEY = "mode"
SPLITS_KEY = "splits_itself"
SHARDS_KEY = "shards"
INDEX_KEY = "index"
WORKERS_KEY = "workers"
LENGTH_KEY = "length"
POSITIONS_KEY = "positions"
SNAPSHOTS_KEY = "snapshots"
TURN_KEY = "turn"
LEVEL_KEY = "level"
"""Whether all ranks have delivered equally much, so that the global count tells each rank's position."""


@final
@dataclass(frozen=True, slots=True)
class Readers:
    """Who reads a stream: ``shards`` ranks, this being rank ``index``, each with ``workers`` (0: in its process)."""

    shards: int
    index: int
    workers: int


class Resumed(NamedTuple):
    """Where the readers begin, in which mode (None: free to choose), and how far the streams were read, if known."""

    start: Start
    mode: Mode | None = None
    left: Left | None = None


def resume(record: Mapping[str, Json], cursor: Cursor, private: Mapping[str, Any] | None, here: Readers) -> Resumed:
    """From where a saved position is read on.

    A position in a stream that all readers read alike holds for any number of ranks and workers. Streams that a dataset
    cut itself are read on one by one by as many readers; by others they are read as one stream (``LeftStreams``).
    Raises ``DataStateError`` where it is not known how far each was read.
    """
    if record.get(KIND_KEY, KIND) != KIND:
        raise DataStateError(f"the state is of a {record[KIND_KEY]!r} loader; this loader reads an iterable dataset")
    if not cursor.samples:
        return Resumed(Start(cursor.epoch))
    mode, splits = record.get(MODE_KEY, "stride"), bool(record.get(SPLITS_KEY, False))
    left = Left.from_record(record)
    as_one = Start(cursor.epoch, (cursor.samples,), whole=True, base=0 if left is None else left.samples)
    if mode == "left":
        return Resumed(as_one, mode, left)
    mine = private if private is not None and _same_readers(private, here, splits) else None
    if mode == "stride" and not splits:
        # Every reader sees the same stream, so any rank's snapshot serves any other.
        known = [Snapshot(*entry) for entry in (private or {}).get(SNAPSHOTS_KEY, []) if entry is not None]
        usable = [snapshot for snapshot in known if snapshot.at <= cursor.samples]
        best = max(usable, key=lambda snapshot: snapshot.at, default=None)
        return Resumed(Start(cursor.epoch, (cursor.samples,), (best,), whole=True), mode)
    if mine is not None:
        snapshots = tuple(None if entry is None else Snapshot(*entry) for entry in mine[SNAPSHOTS_KEY])
        turn = mine[TURN_KEY] if splits else 0
        return Resumed(Start(cursor.epoch, tuple(mine[POSITIONS_KEY]), snapshots, turn, whole=not splits), mode, left)
    if left is not None and _cut_alike(left, mode, here, splits):
        if mode == "native":
            return Resumed(Start(cursor.epoch, left.of_shard(here.index), turn=left.turn, whole=not splits), mode, left)
        snapshots = _usable(private, left) if splits else (None,)
        return Resumed(Start(cursor.epoch, left.taken, snapshots, left.turn, whole=not splits), mode, left)
    level = record.get(LEVEL_KEY, True) and not cursor.samples % here.shards
    if record.get(SHARDS_KEY) == here.shards and not splits and level:
        return Resumed(Start(cursor.epoch, (cursor.samples // here.shards,), whole=True), mode, left)
    if left is not None:
        return Resumed(as_one, "left", left)
    raise DataStateError(_cannot_resume(record, cursor, here, splits))


def _same_readers(private: Mapping[str, Any], here: Readers, splits: bool) -> bool:
    same_shard = (private.get(SHARDS_KEY), private.get(INDEX_KEY)) == (here.shards, here.index)
    return same_shard and (not splits or private.get(WORKERS_KEY) == here.workers)


def _usable(private: Mapping[str, Any] | None, left: Left) -> tuple[Snapshot | None, ...]:
    """Any rank's snapshots of streams that all ranks read alike, of those that are not behind the position."""
    if private is None or len(private.get(SNAPSHOTS_KEY, [])) != len(left.taken):
        return (None,)
    known = [None if entry is None else Snapshot(*entry) for entry in private[SNAPSHOTS_KEY]]
    return tuple(
        one if one is not None and one.at <= taken else None for one, taken in zip(known, left.taken, strict=True)
    )


def _cut_alike(left: Left, mode: Mode, here: Readers, splits: bool) -> bool:
    """Whether these readers would have the same streams. Strided ones are the same for any number of ranks."""
    return (mode == "stride" or left.shards == here.shards) and (not splits or left.workers == here.workers)


def _cannot_resume(record: Mapping[str, Json], cursor: Cursor, here: Readers, splits: bool) -> str:
    how = f"{record.get(SHARDS_KEY)} ranks" + (f" with {record.get(WORKERS_KEY)} workers each" if splits else "")
    now = f"{here.shards} ranks" + (f" with {here.workers}" if splits else "")
    by = "by loader workers" if splits else "into shards"
    return (
        f"this position (epoch {cursor.epoch}, {cursor.samples} samples) is in streams the dataset cut {by} for {how}; "
        f"here are {now}, whose streams hold other samples. What works: resume with {how} and each rank's own state; "
        f"begin epoch {cursor.epoch + 1} with set_epoch; and, for runs that must change their size, exact_streams=True "
        "from the start"
    )

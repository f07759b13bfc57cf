"""The position of a stream, as states save it, and the start of each reader that follows from it."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, final

from accel_data.iterable.capabilities import Mode
from accel_data.iterable.reshard import ShardProgress
from accel_data.iterable.worker import Snapshot, Start
from accel_data.order.cursor import Cursor
from accel_data.source import KIND_KEY, Json
from accel_state.errors import DataStateError

KIND = "stream"
MODE_KEY, DIVIDED_KEY, LEVEL_KEY, PROGRESS_KEY, LENGTH_KEY = "mode", "splits_itself", "level", "left", "length"
ORDER_KEY = "order"
"""In the records of map-style data."""
SHARDS_KEY, INDEX_KEY, WORKERS_KEY = "shards", "index", "workers"
POSITIONS_KEY, SNAPSHOTS_KEY, TURN_KEY = "positions", "snapshots", "turn"
SKIP_KEY, FROM_KEY, TO_KEY, BATCHES_KEY, ROWS_KEY = "skip", "from", "to", "batches", "rows"


@final
@dataclass(frozen=True, slots=True)
class Readers:
    """Who reads a stream: ``shards`` ranks, this being rank ``index``, each with ``workers`` (0: in its process)."""

    shards: int
    index: int
    workers: int

    def private(self, positions: list[int], snapshots: list[Snapshot | None], turn: int) -> dict[str, Any]:
        """What this rank alone needs to go on exactly: by stream, with the worker whose turn it is. JSON values."""
        return {
            SHARDS_KEY: self.shards,
            INDEX_KEY: self.index,
            WORKERS_KEY: self.workers,
            POSITIONS_KEY: positions,
            SNAPSHOTS_KEY: [None if snapshot is None else list(snapshot) for snapshot in snapshots],
            TURN_KEY: turn,
        }


@final
@dataclass(frozen=True, slots=True)
class StreamPosition:
    """A position in streams, with what it is only valid with.

    Attributes:
        cursor: epoch and samples delivered, over all ranks.
        mode: how the ranks shared the dataset.
        readers: who read it (0 shards: an old state that does not say).
        divided: each worker read a stream of its own.
        level: all ranks have delivered equally much, so that the global count tells each rank's position.
        progress: how far each stream was read; None: one stream was read by all, or it is not known.
        private: what this rank alone needs to go on exactly (positions and snapshots of its workers' streams).
        skip: batches to read and drop behind it, where no count of samples tells what they hold, and by whom.
    """

    cursor: Cursor
    mode: Mode
    readers: Readers
    divided: bool = False
    level: bool = True
    progress: ShardProgress | None = None
    private: Mapping[str, Any] | None = None
    skip: Mapping[str, int] | None = None

    @property
    def target(self) -> Cursor:
        """The cursor behind what is skipped."""
        return self.cursor if self.skip is None else Cursor(self.cursor.epoch, self.skip[TO_KEY])

    def skipping(self, to: Cursor, batches: int, rows: int, here: Readers) -> "StreamPosition":
        """This position with ``batches`` batches more to skip, of ``rows`` over all ranks, which lead to ``to``."""
        batches += 0 if self.skip is None else self.skip[BATCHES_KEY]
        skip = {TO_KEY: to.samples, BATCHES_KEY: batches, ROWS_KEY: rows}
        return replace(self, skip=skip | {SHARDS_KEY: here.shards, WORKERS_KEY: here.workers})

    def check_skip(self, here: Readers, rows: int) -> None:
        """Raises ``DataStateError`` where the batches to skip would not be those of the saved run."""
        skip, by = self.skip, "{} ranks with {} workers and steps of {} samples"
        now = (here.shards, here.workers, rows)
        if skip is not None and (then := (skip[SHARDS_KEY], skip[WORKERS_KEY], skip[ROWS_KEY])) != now:
            raise DataStateError(
                f"the state was saved between skip_first_batches and the first batch, by {by.format(*then)}. Which "
                f"samples the {skip[BATCHES_KEY]} skipped batches hold, in a stream that workers may divide, only the "
                f"same readers find out; here are {by.format(*now)}. What works: resume with as many; save after the "
                "first batch; or use exact_streams=True from the start"
            )

    def record(self) -> dict[str, Json]:
        """The part that is the same on every rank."""
        record: dict[str, Json] = {KIND_KEY: KIND, MODE_KEY: self.mode, DIVIDED_KEY: self.divided}
        record |= {SHARDS_KEY: self.readers.shards, WORKERS_KEY: self.readers.workers, LEVEL_KEY: self.level}
        if self.progress is not None:
            record[PROGRESS_KEY] = self.progress.record()
        return record if self.skip is None else record | {SKIP_KEY: {FROM_KEY: self.cursor.samples, **self.skip}}

    @classmethod
    def load(cls, record: Mapping[str, Json], cursor: Cursor, private: Mapping[str, Any] | None) -> "StreamPosition":
        """The reverse of ``record``; raises ``DataStateError`` for the state of another kind of loader."""
        if record.get(KIND_KEY, KIND) != KIND:
            kind = record[KIND_KEY]
            raise DataStateError(f"the state is of a {kind!r} loader; this loader reads an iterable dataset")
        if cursor.samples and ORDER_KEY in record:
            raise DataStateError(
                f"the position is sample {cursor.samples} of map-style data, and an iterable dataset "
                "has another order. Give each loader its own state, or resume at the start of an epoch"
            )
        shards, workers, skip = record.get(SHARDS_KEY, 0), record.get(WORKERS_KEY, 0), record.get(SKIP_KEY)
        if skip is not None and skip[TO_KEY] == cursor.samples:
            cursor, skip = Cursor(cursor.epoch, skip[FROM_KEY]), {key: skip[key] for key in skip if key != FROM_KEY}
        else:  # the batches were to be skipped in a pass that had not begun
            skip = None
        position = cls(cursor, record.get(MODE_KEY, "stride"), Readers(shards, 0, workers), skip=skip)
        if not cursor.samples:
            return position
        return replace(
            position,
            divided=bool(record.get(DIVIDED_KEY, False)),
            level=bool(record.get(LEVEL_KEY, True)),
            progress=ShardProgress.load(record.get(PROGRESS_KEY)),
            private=private,
        )


def resume(position: StreamPosition, here: Readers) -> tuple[Start, Mode | None]:
    """From where the readers ``here`` read a position on, and in which mode (None: free to choose).

    A position in a stream that all readers read alike holds for any number of ranks and workers. Streams that a dataset
    cut itself are read on one by one by as many readers; by others they are read as one stream (``MergedRemainder``).
    Raises ``DataStateError`` where it is not known how far each was read.
    """
    cursor, mode, divided, progress = position.cursor, position.mode, position.divided, position.progress
    epoch, private = cursor.epoch, position.private or {}
    if not cursor.samples:
        return Start(epoch), None
    base = 0 if progress is None else progress.samples
    merged = Start(epoch, (cursor.samples,), undivided=True, base=base)
    if mode == "left":
        return merged, mode
    known = tuple(None if entry is None else Snapshot(*entry) for entry in private.get(SNAPSHOTS_KEY, ()))
    if mode == "stride" and not divided:
        # Every reader sees the same stream, so any rank's snapshot serves any other.
        usable = [snapshot for snapshot in known if snapshot is not None and snapshot.at <= cursor.samples]
        best = max(usable, key=lambda snapshot: snapshot.at, default=None)
        return Start(epoch, (cursor.samples,), (best,), undivided=True), mode
    same_shard = (private.get(SHARDS_KEY), private.get(INDEX_KEY)) == (here.shards, here.index)
    if same_shard and (not divided or private[WORKERS_KEY] == here.workers):
        turn = private[TURN_KEY] if divided else 0
        return Start(epoch, tuple(private[POSITIONS_KEY]), known, turn, undivided=not divided), mode
    if progress is not None and progress.is_cut_alike(here.shards if mode == "native" else 1, here.workers, divided):
        taken = progress.of_shard(here.index) if mode == "native" else progress.taken
        if mode == "native" or len(known) != len(taken):
            known = (None,)
        else:  # of streams that all ranks read alike, so any rank's snapshots serve that are not behind the position
            known = tuple(one if one and one.at <= count else None for one, count in zip(known, taken, strict=True))
        return Start(epoch, taken, known, progress.turn, undivided=not divided), mode
    level = position.level and not cursor.samples % here.shards
    if position.readers.shards == here.shards and not divided and level:
        return Start(epoch, (cursor.samples // here.shards,), undivided=True), mode
    if progress is not None:
        return merged, "left"
    how = f"{position.readers.shards} ranks" + (f" with {position.readers.workers} workers each" if divided else "")
    now = f"{here.shards} ranks" + (f" with {here.workers}" if divided else "")
    by = "by loader workers" if divided else "into shards"
    raise DataStateError(
        f"this position (epoch {epoch}, {cursor.samples} samples) is in streams the dataset cut {by} for {how}; "
        f"here are {now}, whose streams hold other samples. What works: resume with {how} and each rank's own state; "
        f"begin epoch {epoch + 1} with set_epoch; and, for runs that must change their size, exact_streams=True from "
        "the start"
    )

"""One pass over a stream, with the facts that follow each of its batches."""

from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, final

from accel_data.cursor import Cursor, Step
from accel_data.iterable_agree import Lockstep
from accel_data.iterable_reader import Delivered, Snapshot, Start
from accel_data.source import Pass

if TYPE_CHECKING:
    from accel_data.iterable_source import StreamSource


class Note(NamedTuple):
    """What is known behind one batch."""

    positions: tuple[int, ...]
    snapshots: tuple[Snapshot | None, ...]
    turn: int = 0
    splits: bool = False
    samples: int = 0
    counts: tuple[int, ...] | None = None
    level: bool = True
    taken: tuple[int, ...] | None = None
    turn_of_all: int = 0


@final
class StreamPass(Pass):
    """One walk over a stream.

    ``start`` is the readers' at ``begun``; ``dropped`` batches from there on are read and forgotten, so that the first
    one delivered is that at ``cursor``.
    """

    def __init__(
        self,
        source: "StreamSource",
        cursor: Cursor,
        start: Start,
        lockstep: Lockstep | None,
        *,
        begun: Cursor,
        dropped: int = 0,
    ) -> None:
        self._source, self._cursor, self._begun, self._first = source, cursor, begun, 1 - dropped
        workers = max(source._here.workers, 1)
        self._positions = list(start.positions) if len(start.positions) > 1 else [start.positions[0]] * workers
        self._snapshots = list(start.snapshots) if len(start.snapshots) > 1 else [start.snapshots[0]] * workers
        self._note = Note(
            start.positions, start.snapshots, start.turn, source._splits, begun.samples, level=source._level
        )
        self._notes = deque([(0, self._note)], maxlen=3)
        self.length = source.length(cursor)
        self._taken: list[int] | None = None
        self.batches = self._read() if lockstep is None else self._read_together(lockstep)

    def _read(self) -> Iterator[Any]:
        source, shards = self._source, self._source._shard.count
        last = 0
        for number, item in enumerate(source.open(), self._first):
            note, last = self._advanced(item), item.part[1]
            if number == self._first:
                self._taken = self._opened(item.splits_itself)
            # Without a word from the others their streams are taken to be like this one.
            samples = sum(self._positions[: len(note.positions)]) * (1 if source.strided else shards)
            self._took_alike(note)
            self._keep(number, note._replace(samples=samples, counts=source.counts(last), taken=self._noted()))
            if number > 0:
                yield item.batch
        if source.strided or shards == 1:
            self.remainder = last % source._reader.stride.group_size

    def _read_together(self, lockstep: Lockstep) -> Iterator[Any]:
        source = self._source
        size = source._reader.stride.batch_size
        last = 0
        for number, agreed in enumerate(lockstep.run(source.open(), source.first), self._first):
            item, is_new, counts, places = agreed
            note = self._advanced(item) if is_new else self._note
            if number == self._first:
                self._taken = self._opened(note.splits)
            self._took(note.splits, counts, places)
            real = tuple(max(count, 0) for count in counts)
            full, last = min(counts) == size, sum(real)
            self._keep(
                number,
                note._replace(
                    samples=self._note.samples + last,
                    counts=real if not full and source._batched else None,
                    level=self._note.level and full,
                    taken=self._noted(),
                    turn_of_all=(places[0][0] + 1) % len(self._positions) if note.splits else 0,
                ),
            )
            if number > 0:
                yield item.batch
        self.remainder = last % source.total_batch_size

    def _opened(self, splits: bool) -> list[int] | None:
        """Elements that were taken before of each stream there is; None where one is read by all, or nobody knows."""
        source = self._source
        shards = source._shard.count if source.mode == "native" else 1
        if source.mode not in ("native", "stride") or (shards == 1 and not splits):
            return None
        if source._left is not None:
            return list(source._left.taken)
        if self._begun.samples and splits:
            return None
        return [self._note.positions[0]] * (shards * (source._here.workers if splits else 1))

    def _took_alike(self, note: Note) -> None:
        """Without a word from the others: of streams like this one as much was taken, if they still hold so much."""
        if self._taken is None:
            return
        if self._source.strided:
            self._taken = list(note.positions)
        elif note.splits and len(note.positions) > 1:
            self._taken = None
        else:
            self._taken = [count + self._source._reader.stride.batch_size for count in self._taken]

    def _took(self, splits: bool, counts: tuple[int, ...], places: tuple[tuple[int, int], ...]) -> None:
        if self._taken is None:
            return
        workers = len(self._taken) // len(places)
        for share, (worker, stop) in enumerate(places):
            if counts[share] >= 0:
                self._taken[share * workers + (worker if splits else 0)] = stop

    def _noted(self) -> tuple[int, ...] | None:
        return None if self._taken is None else tuple(self._taken)

    def _advanced(self, item: Delivered) -> Note:
        worker = item.worker if item.splits_itself else 0
        self._positions[worker] = item.part[2]
        if item.snapshot is not None:
            self._snapshots[worker] = item.snapshot
        self._source.saw(item)
        used = slice(None) if item.splits_itself else slice(1)
        turn = (item.worker + 1) % len(self._positions)
        note = Note(tuple(self._positions[used]), tuple(self._snapshots[used]), turn, item.splits_itself)
        return note._replace(turn_of_all=turn if item.splits_itself else 0)

    def _keep(self, number: int, note: Note) -> None:
        self._note = note
        self._notes.append((number, note))

    @property
    def readers(self) -> Iterator[Any]:
        return self._source.readers

    def close(self) -> None:
        super().close()
        self._source.shut()

    def step(self, number: int) -> Step:
        note = next(note for counted, note in reversed(self._notes) if counted == number)
        if number == 0:
            return Step(self._cursor, private=self._source.private(note) if self._cursor.samples else None)
        return self._source.step(self._cursor, note)

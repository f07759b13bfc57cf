"""Iterable datasets as a source: who reads what, and from where a later run goes on."""

import copy
import warnings
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, final

from accel_data.cursor import Cursor, Step
from accel_data.iterable import Stride, check_split
from accel_data.iterable_reader import Delivered, Snapshot, Start, StreamReader, WorkerInit
from accel_data.iterable_traits import (
    Mode,
    Reading,
    amplification_warning,
    choose_reading,
    inspect_stream,
    shard_natively,
)
from accel_data.options import LoaderOptions
from accel_data.source import Json, Pass, Source
from accel_state.errors import ConfigError, DataStateError

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

    from accel_state.parallelism import DataShard

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


@final
@dataclass(frozen=True, slots=True)
class Readers:
    """Who reads a stream: ``shards`` ranks, this being rank ``index``, each with ``workers`` (0: in its process)."""

    shards: int
    index: int
    workers: int


def resume(
    record: Mapping[str, Json], cursor: Cursor, private: Mapping[str, Any] | None, here: Readers
) -> tuple[Start, Mode | None]:
    """Where the readers begin for a saved position, and the mode in which it was counted (None: free to choose).

    A position in a stream that all readers read alike holds for any number of ranks and workers. One in streams that
    datasets cut themselves holds only where they are cut the same way again: raises ``DataStateError`` otherwise.
    """
    if record.get(KIND_KEY, KIND) != KIND:
        raise DataStateError(f"the state is of a {record[KIND_KEY]!r} loader; this loader reads an iterable dataset")
    if not cursor.samples:
        return Start(cursor.epoch), None
    mode, splits = record.get(MODE_KEY, "stride"), bool(record.get(SPLITS_KEY, False))
    mine = private if private is not None and _same_readers(private, here, splits) else None
    if mode == "stride" and not splits:
        # Every reader sees the same stream, so any rank's snapshot serves any other.
        known = [Snapshot(*entry) for entry in (private or {}).get(SNAPSHOTS_KEY, []) if entry is not None]
        usable = [snapshot for snapshot in known if snapshot.at <= cursor.samples]
        best = max(usable, key=lambda snapshot: snapshot.at, default=None)
        return Start(cursor.epoch, (cursor.samples,), (best,)), "stride"
    if mine is not None:
        snapshots = tuple(None if entry is None else Snapshot(*entry) for entry in mine[SNAPSHOTS_KEY])
        return Start(cursor.epoch, tuple(mine[POSITIONS_KEY]), snapshots, mine[TURN_KEY] if splits else 0), mode
    if record.get(SHARDS_KEY) == here.shards and not splits and not cursor.samples % here.shards:
        return Start(cursor.epoch, (cursor.samples // here.shards,)), mode
    raise DataStateError(_cannot_resume(record, cursor, here, splits))


def _same_readers(private: Mapping[str, Any], here: Readers, splits: bool) -> bool:
    same_shard = (private.get(SHARDS_KEY), private.get(INDEX_KEY)) == (here.shards, here.index)
    return same_shard and (not splits or private.get(WORKERS_KEY) == here.workers)


def _cannot_resume(record: Mapping[str, Json], cursor: Cursor, here: Readers, splits: bool) -> str:
    how = f"{record.get(SHARDS_KEY)} ranks" + (f" with {record.get(WORKERS_KEY)} workers each" if splits else "")
    now = f"{here.shards} ranks" + (f" with {here.workers}" if splits else "")
    by = "by loader workers" if splits else "into shards"
    return (
        f"this position (epoch {cursor.epoch}, {cursor.samples} samples) is in streams the dataset cut {by} for {how}; "
        f"here are {now}, whose streams hold other samples. What works: resume with {how} and each rank's own state; "
        f"begin epoch {cursor.epoch + 1} with set_epoch; and, for runs that must change their size, exact_streams=True "
        "from the start with a dataset that does not divide itself"
    )


@final
class StreamSource(Source):
    """Batches of an iterable dataset for one rank."""

    def __init__(self, loader: "DataLoader[Any]", shard: "DataShard", options: LoaderOptions) -> None:
        """Looks at the dataset and decides how it is shared; reads nothing. Warns once when that is wasteful."""
        self._loader, self._shard = loader, shard
        self._dataset: Any = loader.dataset
        self._here = Readers(shard.count, shard.index, loader.num_workers)
        self.even_batches = options.even_batches
        self._batched = loader.batch_size is not None
        size = loader.batch_size or 1
        if options.split_batches:
            if not self._batched:
                raise ConfigError("split_batches needs a batch size: give the DataLoader batch_size, or drop it")
            size = check_split(size, shard.count)
        self._batch_size = size
        self.total_batch_size = size * shard.count
        self._reading = choose_reading(
            inspect_stream(self._dataset),
            shards=shard.count,
            workers=loader.num_workers,
            already_sharded=options.already_sharded,
            exact=options.exact_streams,
        )
        self._warn(self._reading)
        self._start: Start | None = None
        self._start_mode: Mode | None = None
        self._splits = False
        self._use(self._reading.mode)

    @property
    def mode(self) -> Mode:
        """How the ranks share the dataset in the next pass."""
        return self._mode

    def _warn(self, reading: Reading) -> None:
        if reading.amplification > 1 and self._shard.index == 0:
            name = type(self._dataset).__name__
            shards, workers = self._here.shards, self._here.workers
            warnings.warn(
                amplification_warning(reading, name=name, shards=shards, workers=workers), RuntimeWarning, stacklevel=2
            )

    def _use(self, mode: Mode) -> None:
        """Puts a reader of this mode in the place of the dataset, in a copy of the user's loader."""
        loader, shard = self._loader, self._shard
        strided = mode == "stride"
        dataset = shard_natively(self._dataset, shard.count, shard.index) if mode == "native" else self._dataset
        stride = Stride(
            batch_size=self._batch_size,
            shards=shard.count if strided else 1,
            index=shard.index if strided else 0,
            drop_last=loader.drop_last,
            even=self.even_batches and shard.count > 1,
        )
        self._mode = mode
        self._reader = StreamReader(
            dataset, stride, loader.collate_fn, batched=self._batched, shared=loader.persistent_workers
        )
        self._inner = _with(
            loader,
            dataset=self._reader,
            batch_sampler=None,
            collate_fn=_unchanged,
            worker_init_fn=WorkerInit(loader.worker_init_fn, self._reader),
        )
        self.dataloader = _with(loader, dataset=dataset)
        self.total_dataset_length = _size(self._dataset) if strided else None

    def begin(self, cursor: Cursor) -> Pass:
        start, mode = self._start_for(cursor)
        even = self.even_batches and self._shard.count > 1
        if mode != self._mode or even is not self._reader.stride.even:
            self._use(mode)
        plain = start == Start(cursor.epoch)
        if not (plain and self._reader.start == Start(self._reader.start.epoch)):
            # Living workers know the epoch only; a position has to be handed to new ones.
            self._inner._iterator = None
        self._reader.begin(start)
        return StreamPass(self, cursor, start)

    def _start_for(self, cursor: Cursor) -> tuple[Start, Mode]:
        """The start that was restored, if it is this position's, or one found by counting."""
        if self._start is not None and self._restored == cursor:
            return self._start, self._start_mode or self._reading.mode
        start, mode = resume(self.record(), cursor, None, self._here)
        return start, mode or self._reading.mode

    def length(self, cursor: Cursor) -> int | None:
        total = _size(self._reader.dataset)
        if total is None:
            return None
        stride = self._reader.stride
        passed = cursor.samples if self._mode == "stride" else cursor.samples // self._shard.count
        return -(-stride.length(max(total - passed, 0)) // stride.batch_size)

    def skip(self, cursor: Cursor, batches: int) -> Cursor:
        total = self.total_dataset_length
        samples = cursor.samples + batches * self.total_batch_size
        return Cursor(cursor.epoch, samples if total is None else min(samples, total))

    def record(self) -> dict[str, Json]:
        record: dict[str, Json] = {
            KIND_KEY: KIND,
            MODE_KEY: self._mode,
            SPLITS_KEY: self._splits,
            SHARDS_KEY: self._here.shards,
            WORKERS_KEY: self._here.workers,
        }
        if self.total_dataset_length is not None:
            record[LENGTH_KEY] = self.total_dataset_length
        return record

    def restore(self, record: Mapping[str, Json], cursor: Cursor, private: Mapping[str, Any] | None) -> None:
        here, saved = _size(self._dataset), record.get(LENGTH_KEY)
        if saved is not None and here is not None and saved != here:
            raise DataStateError(
                f"the state is of an iterable dataset with {saved} samples; this one has {here}: give the dataset "
                "of the saved run, or begin a new epoch with set_epoch"
            )
        self._start, self._start_mode = resume(record, cursor, private, self._here)
        self._restored = cursor
        self._splits = bool(record.get(SPLITS_KEY, False))

    def private(self, note: "_Note") -> dict[str, Any] | None:
        """What this rank alone needs to go on behind ``note``; None when the number of samples says it all."""
        exact = self._mode == "stride" and not note.splits
        if exact and not any(note.snapshots):
            return None
        return {
            SHARDS_KEY: self._here.shards,
            INDEX_KEY: self._here.index,
            WORKERS_KEY: self._here.workers,
            POSITIONS_KEY: list(note.positions),
            SNAPSHOTS_KEY: [None if snapshot is None else list(snapshot) for snapshot in note.snapshots],
            TURN_KEY: note.turn,
        }

    def step(self, cursor: Cursor, note: "_Note") -> Step:
        """The facts behind one delivered batch."""
        stride, shards = self._reader.stride, self._shard.count
        samples = sum(note.positions) * (1 if self._mode == "stride" else shards)
        counts = None
        if self._batched and stride.shards > 1 and note.group_real < stride.group_size:
            cuts = (note.group_real - i * stride.batch_size for i in range(shards))
            absent = 0 if stride.even else -1
            counts = tuple(min(cut, stride.batch_size) if cut > 0 else absent for cut in cuts)
        return Step(Cursor(cursor.epoch, samples), counts, private=self.private(note))

    def saw(self, item: Delivered) -> None:
        """Remembers what only reading tells: whether the dataset divides itself among workers."""
        self._splits = item.splits_itself

    def open(self) -> Iterator[Delivered]:
        """Starts the readers."""
        return iter(self._inner)


class _Note(NamedTuple):
    """What is known behind one batch."""

    group_real: int
    positions: tuple[int, ...]
    snapshots: tuple[Snapshot | None, ...]
    turn: int
    splits: bool


@final
class StreamPass(Pass):
    """One walk over a stream."""

    def __init__(self, source: StreamSource, cursor: Cursor, start: Start) -> None:
        self._source, self._cursor = source, cursor
        self._group_size = source._reader.stride.group_size
        workers = max(source._here.workers, 1)
        self._positions = list(start.positions) if len(start.positions) > 1 else [start.positions[0]] * workers
        self._snapshots = list(start.snapshots) if len(start.snapshots) > 1 else [start.snapshots[0]] * workers
        first = _Note(0, start.positions, start.snapshots, start.turn, source._splits)
        self._before = first
        self._notes: deque[tuple[int, _Note]] = deque(maxlen=3)
        self._last = self._group_size
        self.length = source.length(cursor)
        self.batches = self._read()

    def _read(self) -> Iterator[Any]:
        for number, item in enumerate(self._source.open(), 1):
            self._notes.append((number, self._note(item)))
            yield item.batch
        if self._source.mode == "stride" or self._source._shard.count == 1:
            self.remainder = self._last % self._group_size

    def _note(self, item: Delivered) -> _Note:
        _, self._last, stop = item.part
        worker = item.worker if item.splits_itself else 0
        self._positions[worker] = stop
        if item.snapshot is not None:
            self._snapshots[worker] = item.snapshot
        self._source.saw(item)
        used = slice(None) if item.splits_itself else slice(1)
        turn = (item.worker + 1) % len(self._positions)
        return _Note(self._last, tuple(self._positions[used]), tuple(self._snapshots[used]), turn, item.splits_itself)

    def step(self, number: int) -> Step:
        if number == 0:
            return Step(self._cursor, private=self._source.private(self._before) if self._cursor.samples else None)
        note = next(note for counted, note in self._notes if counted == number)
        return self._source.step(self._cursor, note)


def _with(loader: "DataLoader[Any]", **changes: Any) -> "DataLoader[Any]":
    """A copy of the user's loader, of its class and with all its options but these."""
    other = copy.copy(loader)
    # A DataLoader refuses to have these set once it exists, because its own sampler is made from them.
    other.__dict__.update(changes, _iterator=None)
    return other


def _unchanged(item: Any) -> Any:
    return item


def _size(dataset: object) -> int | None:
    try:
        return len(dataset)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError, AttributeError):
        return None

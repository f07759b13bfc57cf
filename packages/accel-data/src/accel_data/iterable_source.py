"""Iterable datasets as a source: who reads what, and what is known behind each batch."""

import copy
import warnings
from collections import deque
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, final

from accel_data.cursor import Cursor, Step
from accel_data.iterable import Stride, check_split
from accel_data.iterable_agree import Lockstep
from accel_data.iterable_reader import Delivered, Snapshot, Start, StreamReader, WorkerInit
from accel_data.iterable_resume import (
    INDEX_KEY,
    KIND,
    KIND_KEY,
    LENGTH_KEY,
    LEVEL_KEY,
    MODE_KEY,
    POSITIONS_KEY,
    SHARDS_KEY,
    SNAPSHOTS_KEY,
    SPLITS_KEY,
    TURN_KEY,
    WORKERS_KEY,
    Readers,
    resume,
)
from accel_data.iterable_traits import (
    Mode,
    Reading,
    amplification_warning,
    choose_reading,
    inspect_stream,
    shard_natively,
)
from accel_data.options import LoaderOptions
from accel_data.peers import connect
from accel_data.source import Json, Pass, Source
from accel_state.errors import ConfigError, DataStateError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.utils.data import DataLoader

    from accel_state.parallelism import DataShard


@final
class StreamSource(Source):
    """Batches of an iterable dataset for one rank."""

    def __init__(
        self,
        loader: "DataLoader[Any]",
        shard: "DataShard",
        options: LoaderOptions,
        *,
        group: "ProcessGroup | None" = None,
    ) -> None:
        """Looks at the dataset and decides how it is shared; reads nothing. Warns once when that is wasteful.

        ``group`` (None: the default one) lets ranks with streams of their own agree on when an epoch ends.
        """
        self._loader, self._shard, self._group = loader, shard, group
        self._lockstep: Lockstep | None = None
        self._exact = options.exact_streams
        self._level = True
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
            dataset,
            stride,
            loader.collate_fn,
            batched=self._batched,
            shared=loader.persistent_workers,
            whole=self._exact,
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
        if not cursor.samples:
            self._level = True
        return StreamPass(self, cursor, start, self._agreement() if even and mode != "stride" else None)

    def _agreement(self) -> Lockstep | None:
        """With streams of their own, ranks must be told when another one ends. None without a process group."""
        if self._lockstep is None:
            peers = connect(self, self._shard, self._group)
            self._lockstep = None if peers is None else Lockstep(peers)
        return self._lockstep

    def first(self) -> Delivered | None:
        """The first batch of this rank's stream, read here: it fills up steps of a pass that begins behind its end."""
        reader = StreamReader(
            self._reader.dataset, self._reader.stride, self._loader.collate_fn, batched=self._batched, shared=False
        )
        reader.begin(Start(self._reader.start.epoch))
        return next(iter(reader), None)

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
            LEVEL_KEY: self._level,
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
        self._splits, self._level = bool(record.get(SPLITS_KEY, False)), bool(record.get(LEVEL_KEY, True))

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
        self._level = note.level
        return Step(Cursor(cursor.epoch, note.samples), note.counts, private=self.private(note))

    def counts(self, group_real: int) -> tuple[int, ...] | None:
        """Real rows by data rank of a group cut from one stream; None when it is full."""
        stride = self._reader.stride
        if not self._batched or stride.shards == 1 or group_real == stride.group_size:
            return None
        cuts = (group_real - index * stride.batch_size for index in range(stride.shards))
        absent = 0 if stride.even else -1
        return tuple(min(cut, stride.batch_size) if cut > 0 else absent for cut in cuts)

    def saw(self, item: Delivered) -> None:
        """Remembers what only reading tells: whether the dataset divides itself among workers."""
        self._splits = item.splits_itself

    def open(self) -> Iterator[Delivered]:
        """Starts the readers."""
        return iter(self._inner)


class _Note(NamedTuple):
    """What is known behind one batch."""

    positions: tuple[int, ...]
    snapshots: tuple[Snapshot | None, ...]
    turn: int = 0
    splits: bool = False
    samples: int = 0
    counts: tuple[int, ...] | None = None
    level: bool = True


@final
class StreamPass(Pass):
    """One walk over a stream."""

    def __init__(self, source: StreamSource, cursor: Cursor, start: Start, lockstep: Lockstep | None) -> None:
        self._source, self._cursor = source, cursor
        workers = max(source._here.workers, 1)
        self._positions = list(start.positions) if len(start.positions) > 1 else [start.positions[0]] * workers
        self._snapshots = list(start.snapshots) if len(start.snapshots) > 1 else [start.snapshots[0]] * workers
        self._note = _Note(
            start.positions, start.snapshots, start.turn, source._splits, cursor.samples, level=source._level
        )
        self._notes = deque([(0, self._note)], maxlen=3)
        self.length = source.length(cursor)
        self.batches = self._read() if lockstep is None else self._read_together(lockstep)

    def _read(self) -> Iterator[Any]:
        source, shards = self._source, self._source._shard.count
        last = 0
        for number, item in enumerate(source.open(), 1):
            note, last = self._advanced(item), item.part[1]
            # Without a word from the others their streams are taken to be like this one.
            samples = sum(self._positions[: len(note.positions)]) * (1 if source.mode == "stride" else shards)
            self._keep(number, note._replace(samples=samples, counts=source.counts(last)))
            yield item.batch
        if source.mode == "stride" or shards == 1:
            self.remainder = last % source._reader.stride.group_size

    def _read_together(self, lockstep: Lockstep) -> Iterator[Any]:
        source = self._source
        size = source._reader.stride.batch_size
        last = 0
        for number, (item, is_new, counts) in enumerate(lockstep.run(source.open(), source.first), 1):
            note = self._advanced(item) if is_new else self._note
            real = tuple(max(count, 0) for count in counts)
            full, last = min(counts) == size, sum(real)
            self._keep(
                number,
                note._replace(
                    samples=self._note.samples + last,
                    counts=real if not full and source._batched else None,
                    level=self._note.level and full,
                ),
            )
            yield item.batch
        self.remainder = last % source.total_batch_size

    def _advanced(self, item: Delivered) -> _Note:
        worker = item.worker if item.splits_itself else 0
        self._positions[worker] = item.part[2]
        if item.snapshot is not None:
            self._snapshots[worker] = item.snapshot
        self._source.saw(item)
        used = slice(None) if item.splits_itself else slice(1)
        turn = (item.worker + 1) % len(self._positions)
        return _Note(tuple(self._positions[used]), tuple(self._snapshots[used]), turn, item.splits_itself)

    def _keep(self, number: int, note: _Note) -> None:
        self._note = note
        self._notes.append((number, note))

    def step(self, number: int) -> Step:
        note = next(note for counted, note in self._notes if counted == number)
        if number == 0:
            return Step(self._cursor, private=self._source.private(note) if self._cursor.samples else None)
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

"""Iterable datasets as a source: the share of each reader, and the facts that follow each batch."""

import copy
import warnings
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, final

import torch

from accel_data.cursor import Cursor, Step
from accel_data.iterable import Stride, check_split
from accel_data.iterable_agree import Lockstep
from accel_data.iterable_left import LEFT_KEY, Left, LeftStreams
from accel_data.iterable_pass import Note, StreamPass
from accel_data.iterable_reader import Delivered, Start, StreamReader, WorkerInit
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
    Resumed,
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
from accel_data.keyed import derive_key
from accel_data.options import LoaderOptions
from accel_data.peers import connect
from accel_data.skipping import iterated, let_go
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
        self._warned = shard.index > 0
        self.readers: Iterator[Delivered] = iter(())
        self._every = getattr(loader, "snapshot_every_n_steps", 1 if options.use_stateful_dataloader else None)
        self._restored: tuple[Cursor, Resumed] | None = None
        self._skips: dict[Cursor, tuple[Cursor, int]] = {}
        self._left: Left | None = None
        self._left_at: Cursor | None = None
        self._splits = self._watched = False
        self._counted: Mode = self._reading.mode
        self._use(self._reading.mode, None)

    @property
    def mode(self) -> Mode:
        """How the ranks share the dataset in the next pass."""
        return self._mode

    @property
    def strided(self) -> bool:
        """All readers read the same and each keeps its part."""
        return self._mode in ("stride", "left")

    @property
    def read_amplification(self) -> int | None:
        """Every data rank reads all of a stream that it keeps a part of; so does every worker that does the same."""
        workers = max(self._here.workers, 1)
        if workers > 1 and not self._watched:
            return None
        return (self._here.shards if self.strided else 1) * (1 if self._splits else workers)

    def _warn(self) -> None:
        """Says once what is read in vain; only reading tells whether workers divide the dataset."""
        self._warned = True
        workers = 1 if self._splits else max(self._here.workers, 1)
        reading = self._reading
        if self._mode == "left":
            reading = Reading("left", "its shards were left inside this epoch by other readers")
        if self.strided and self._here.shards * workers > 1:
            name = type(self._dataset).__name__
            text = amplification_warning(reading, name=name, shards=self._here.shards, workers=workers)
            warnings.warn(text, RuntimeWarning, stacklevel=2)

    def _use(self, mode: Mode, left: Left | None) -> None:
        """Puts a reader of this mode in the place of the dataset, in a copy of the user's loader."""
        loader, shard = self._loader, self._shard
        self._mode = mode
        strided = self.strided
        dataset = shard_natively(self._dataset, shard.count, shard.index) if mode == "native" else self._dataset
        if mode == "left":
            assert left is not None
            dataset = LeftStreams(dataset, left)
        stride = Stride(
            batch_size=self._batch_size,
            shards=shard.count if strided else 1,
            index=shard.index if strided else 0,
            drop_last=loader.drop_last,
            even=self.even_batches and shard.count > 1,
        )
        self._reader = StreamReader(
            dataset,
            stride,
            loader.collate_fn,
            batched=self._batched,
            shared=loader.persistent_workers,
            whole=self._exact,
            every=self._every,
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
        begun, dropped = (cursor, 0) if self._restored_at(cursor) else self._skips.get(cursor, (cursor, 0))
        resumed = self._start_for(begun)
        counted = self.strided or not begun.samples
        if dropped and counted and not self._may_divide(resumed.start):
            begun, dropped, resumed = cursor, 0, self._start_for(cursor)
        start, chosen, self._left = resumed
        mode = chosen or self._reading.mode
        even = self.even_batches and self._shard.count > 1
        if mode != self._mode or mode == "left" or even is not self._reader.stride.even:
            self._use(mode, self._left)
        self._counted = mode
        plain = start == Start(begun.epoch)
        if not (plain and self._reader.start == Start(self._reader.start.epoch)):
            # Living workers know the epoch only; a position has to be handed to new ones.
            self._inner._iterator = None
        self._reader.begin(start)
        if not begun.samples:
            self._level = True
        lockstep = self._agreement() if even and mode in ("native", "given") else None
        return StreamPass(self, cursor, start, lockstep, begun=begun, dropped=dropped)

    def _may_divide(self, start: Start) -> bool:
        """Whether workers that begin there may read streams of their own, of which no count tells the batches."""
        return self._here.workers > 0 and not start.whole and not self._exact and (self._splits or not self._watched)

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

    def _restored_at(self, cursor: Cursor) -> Resumed | None:
        """The start that was restored, if it is this position's."""
        return self._restored[1] if self._restored is not None and self._restored[0] == cursor else None

    def _start_for(self, cursor: Cursor) -> Resumed:
        """The start that was restored, if it is this position's, or one found by counting."""
        if (restored := self._restored_at(cursor)) is not None:
            return restored
        record = self.record(between=False)
        if self._left_at != cursor:  # skipped to, by as many batches of every rank
            record.pop(LEFT_KEY, None)
            record[LEVEL_KEY] = True
        return resume(record, cursor, None, self._here)

    def length(self, cursor: Cursor) -> int | None:
        total = _size(self._reader.dataset)
        if total is None:
            return None
        stride = self._reader.stride
        passed = cursor.samples if self.strided else cursor.samples // self._shard.count
        return -(-stride.length(max(total - passed, 0)) // stride.batch_size)

    def skip(self, cursor: Cursor, batches: int) -> Cursor:
        total = self.total_dataset_length
        samples = cursor.samples + batches * self.total_batch_size
        after = Cursor(cursor.epoch, samples if total is None else min(samples, total))
        if batches:
            self._skips[after] = cursor, batches
        return after

    @property
    def ends_together(self) -> bool:
        """Where steps are filled up: of one stream that all read, or by agreement."""
        alone = self._shard.count == 1
        return alone or (self.even_batches and (self.strided or self._lockstep is not None))

    def record(self, *, between: bool) -> dict[str, Json]:
        record: dict[str, Json] = {
            KIND_KEY: KIND,
            MODE_KEY: self._counted,
            SPLITS_KEY: self._splits,
            SHARDS_KEY: self._here.shards,
            WORKERS_KEY: self._here.workers,
            LEVEL_KEY: self._level,
        }
        if self.total_dataset_length is not None:
            record[LENGTH_KEY] = self.total_dataset_length
        if self._left is not None:
            record[LEFT_KEY] = self._left.state_dict()
        return record

    def restore(self, record: Mapping[str, Json], cursor: Cursor, private: Mapping[str, Any] | None) -> None:
        here, saved = _size(self._dataset), record.get(LENGTH_KEY)
        if saved is not None and here is not None and saved != here:
            raise DataStateError(
                f"the state is of an iterable dataset with {saved} samples; this one has {here}: give the dataset "
                "of the saved run, or begin a new epoch with set_epoch"
            )
        resumed = resume(record, cursor, private, self._here)
        self._restored, self._left, self._left_at = (cursor, resumed), resumed.left, cursor
        self._counted = resumed.mode or self._reading.mode
        self._splits, self._level = bool(record.get(SPLITS_KEY, False)), bool(record.get(LEVEL_KEY, True))

    def private(self, note: Note) -> dict[str, Any] | None:
        """What this rank alone needs to go on behind ``note``; None when the number of samples says it all."""
        if self._mode == "left":
            return None
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

    def step(self, cursor: Cursor, note: Note) -> Step:
        """The facts behind one delivered batch."""
        self._level, after = note.level, Cursor(cursor.epoch, note.samples)
        if self._mode != "left":
            self._left, self._left_at = self._left_by(note), after
        return Step(after, note.counts, private=self.private(note))

    def counts(self, group_real: int) -> tuple[int, ...] | None:
        """Real rows by data rank of a group cut from one stream; None when it is full."""
        stride = self._reader.stride
        if not self._batched or stride.shards == 1 or group_real == stride.group_size:
            return None
        cuts = (group_real - index * stride.batch_size for index in range(stride.shards))
        absent = 0 if stride.even else -1
        return tuple(min(cut, stride.batch_size) if cut > 0 else absent for cut in cuts)

    def _left_by(self, note: Note) -> Left | None:
        """How far each stream was read; None where one stream is read by all, or nobody knows."""
        if note.taken is None:
            return None
        shards = self._shard.count if self._mode == "native" else 1
        stride = self._reader.stride
        workers = len(note.taken) // shards
        return Left(shards, workers, stride.group_size, note.taken, note.turn_of_all, note.samples, note.splits)

    def saw(self, item: Delivered) -> None:
        """Remembers what only reading tells: whether the dataset divides itself among workers."""
        self._splits, self._watched = item.splits_itself, True
        if not self._warned:
            self._warn()

    def open(self) -> Iterator[Delivered]:
        """Starts the readers; the random state of this process stays as it is, also that of a resumed run."""
        generator = torch.Generator()
        if self._here.workers:
            generator.manual_seed(derive_key(torch.initial_seed(), self._reader.start.epoch, self._shard.index))
        self.readers = iterated(self._inner, generator)
        return self.readers

    def shut(self) -> None:
        """Ends the readers, unless they are to stay."""
        self.readers = iter(())
        let_go(self._inner)


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

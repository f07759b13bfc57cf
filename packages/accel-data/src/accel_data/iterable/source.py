"""Iterable datasets as a source: the strategy of one loader, carried from epoch to epoch."""

import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, final

from accel_data.iterable.capabilities import ReadStrategy
from accel_data.iterable.epoch import EpochPlan, StreamEpoch
from accel_data.iterable.lockstep import Lockstep
from accel_data.iterable.readers import ReaderPool
from accel_data.iterable.reshard import MergedRemainder
from accel_data.iterable.resume import BATCHES_KEY, LENGTH_KEY, Readers, StreamPosition, resume
from accel_data.iterable.stride import Stride, check_split
from accel_data.iterable.worker import Delivered, Start
from accel_data.loader_group import connect
from accel_data.loader_spec import LoaderSpec
from accel_data.order.cursor import Cursor
from accel_data.private import copied
from accel_data.source import Json, Pass, Source
from accel_state.errors import ConfigError, DataStateError


@final
class StreamSource(Source):
    """Batches of an iterable dataset for one rank."""

    def __init__(self, spec: LoaderSpec, strategy: ReadStrategy) -> None:
        """``strategy``: how the ranks share the dataset.

        The group of ``spec`` lets ranks with streams of their own agree on when an epoch ends.
        """
        loader, shard, options = spec.dataloader, spec.shard, spec.options
        self._loader, self._shard, self._group, self._options = loader, shard, spec.group, options
        self._dataset: Any = loader.dataset
        self._readers = Readers(shard.count, shard.index, loader.num_workers)
        self.even_batches = options.even_batches
        size = loader.batch_size or 1
        if options.split_batches:
            if loader.batch_size is None:
                raise ConfigError("split_batches needs a batch size: give the DataLoader batch_size, or drop it")
            size = check_split(size, shard.count)
        self._batch_size = size
        self.total_batch_size = size * shard.count
        self._strategy = strategy
        self._lockstep: Lockstep | None = None
        self._said: set[str] = set()
        self._known: dict[Cursor, StreamPosition] = {}
        self._position = StreamPosition(Cursor(), self._strategy.mode, self._readers)
        self._install(self._strategy, self._position)

    @property
    def strategy(self) -> ReadStrategy:
        """How the dataset is shared in the pass that began last."""
        return self._current

    @property
    def read_amplification(self) -> int | None:
        return self._current.amplification

    def _install(self, strategy: ReadStrategy, begun: StreamPosition) -> None:
        """Puts readers for this strategy in the place of the dataset, in a copy of the user's loader."""
        loader, shard, dataset = self._loader, self._shard, self._dataset
        self._current, length, strided = strategy, _size(self._dataset), strategy.strided
        self.total_dataset_length = length if strided else None
        if strategy.mode == "native":
            dataset = dataset.shard(num_shards=shard.count, index=shard.index)
        elif strategy.mode == "left":
            assert begun.progress is not None
            dataset = MergedRemainder(dataset, begun.progress)
        stride = Stride(
            batch_size=self._batch_size,
            shards=shard.count if strided else 1,
            index=shard.index if strided else 0,
            drop_last=loader.drop_last,
            even=self.even_batches and shard.count > 1,
        )
        every = getattr(loader, "snapshot_every_n_steps", 1 if self._options.use_stateful_dataloader else None)
        self._pool = ReaderPool(loader, dataset, stride, exact=self._options.exact_streams, every=every)
        self.dataloader = self._pool.dataloader

    def begin(self, cursor: Cursor) -> Pass:
        begun, start, strategy = self._resumed(cursor)
        even, mode = self.even_batches and self._shard.count > 1, strategy.mode
        if mode != self._current.mode or mode == "left" or even is not self._pool.stride.even:
            self._install(strategy, begun)
        self._current, self._position = strategy, begun
        self._pool.begin(start)
        exchanges, length = even and not strategy.strided, self.length(cursor)
        if exchanges and self._lockstep is None:
            peers = connect(self, self._shard, self._group)
            self._lockstep = None if peers is None else Lockstep(peers)
        plan = EpochPlan(
            cursor=cursor,
            begun=begun,
            start=start,
            strategy=strategy,
            readers=self._readers,
            pool=self._pool,
            lockstep=self._lockstep if exchanges else None,
            length=length,
            initial_seed=self.initial_seed(cursor) if self._readers.workers else None,
            dropped=0 if begun.skip is None else begun.skip[BATCHES_KEY],
            opened=self._opened,
            looked_at=self._looked_at,
        )
        return StreamEpoch(plan)

    def _resumed(self, cursor: Cursor) -> tuple[StreamPosition, Start, ReadStrategy]:
        """The position that a pass from ``cursor`` begins at, where its readers start, and how they share the data."""
        begun = self._position_at(cursor)
        start, mode = resume(begun, self._readers)
        strategy = self._strategy if mode is None else replace(self._strategy, mode=mode)
        if start.undivided:
            strategy = replace(strategy, divided=False)
        if mode == "left":
            strategy = replace(strategy, reason="its shards were left inside this epoch by other readers")
        return begun, start, strategy

    def _position_at(self, cursor: Cursor) -> StreamPosition:
        """The position that was loaded, reported or skipped to at ``cursor``; otherwise one of its samples only."""
        if self._position.target == cursor:
            return self._position
        fresh = StreamPosition(cursor, self._strategy.mode, self._readers, bool(self._strategy.divided))
        return self._known.get(cursor, fresh)

    def assign(self, name: str, value: object) -> None:
        super().assign(name, value)
        self._loader = copied(self._loader)
        setattr(self._loader, name, value)
        self._install(self._current, self._position)

    def length(self, cursor: Cursor) -> int | None:
        total = _size(self._pool.dataloader.dataset)
        if total is None:
            return None
        stride = self._pool.stride
        passed = cursor.samples if self._current.strided else cursor.samples // self._shard.count
        return -(-stride.length(max(total - passed, 0)) // stride.batch_size)

    def skip(self, cursor: Cursor, batches: int) -> Cursor:
        total, rows = self.total_dataset_length, self.total_batch_size
        samples = cursor.samples + batches * rows
        after = Cursor(cursor.epoch, samples if total is None else min(samples, total))
        if batches and self._position.target != after:
            begun = self._position_at(cursor)
            start, mode = resume(begun, self._readers)
            may_divide = self._readers.workers > 0 and self._strategy.divided is not False and not start.undivided
            if may_divide or (begun.cursor.samples and mode in ("native", "given")):
                # Workers may read streams of their own, or ranks have read unequally: only reading finds the batches.
                begun = begun.skipping(after, batches, rows, self._readers)
            else:
                begun = replace(begun, cursor=after, private=None)
            self._known |= {self._position.target: self._position, after: begun}
            self._position = begun
        return after

    @property
    def ends_together(self) -> bool:
        """Where steps are filled up or dropped: of one stream that all read, or by agreement."""
        if self._shard.count == 1 or (self._loader.drop_last and self._current.strided):
            return True
        return self.even_batches and (self._current.strided or self._lockstep is not None)

    def record(self, *, between: bool) -> dict[str, Json]:
        record = self._position.record()
        if self.total_dataset_length is not None:
            record[LENGTH_KEY] = self.total_dataset_length
        return record

    def adapted(self, record: Mapping[str, Json], cursor: Cursor) -> tuple[Mapping[str, Json], Cursor]:
        """Keeps the position in a dataset of another length, unless the dataset now ends before it.

        The epoch begins anew then.
        """
        change, here = self._change(record), _size(self._dataset)
        if change is None or here is None:
            return record, cursor
        epoch, done = f"epoch {cursor.epoch}", cursor.samples
        if not done:
            told = f"{epoch} begins with this one"
        elif done >= record[LENGTH_KEY]:
            told = f"position {done} of {epoch}, where it ended, is kept"
        elif done < here:
            told = f"position {done} of {epoch} is kept, and {here - done} are left to deliver"
        else:
            told = f"{epoch} begins anew: the {done} that were delivered of it may come again"
            cursor = Cursor(cursor.epoch)
        if self._shard.index == 0:
            warnings.warn(f"the loader's state was saved with {change}; {told}", RuntimeWarning, stacklevel=3)
        return {**record, LENGTH_KEY: here}, cursor

    def _change(self, record: Mapping[str, Json]) -> str | None:
        """How the dataset of ``record`` differs from this one; None: it does not, or that is not known."""
        here, saved = _size(self._dataset), record.get(LENGTH_KEY)
        if saved is None or here is None or saved == here:
            return None
        return f"an iterable dataset with {saved} samples; this one has {here}"

    def restore(self, record: Mapping[str, Json], cursor: Cursor, private: Mapping[str, Any] | None) -> None:
        if (change := self._change(record)) is not None:
            raise DataStateError(
                f"the state is of {change}: give the dataset of the saved run, begin a new epoch with set_epoch, or "
                "load with allow_changed_data=True"
            )
        position = StreamPosition.load(record, cursor, private)
        position.check_skip(self._readers, self.total_batch_size)
        resume(position, self._readers)
        self._position, self._known = position, {}
        self.restore_seed(cursor, private)

    def _opened(self, item: Delivered) -> None:
        """Takes over what only reading shows: whether the dataset divides itself among workers."""
        if self._current.divided is None:
            self._strategy = replace(self._strategy, divided=item.divided)
            self._current = replace(self._current, divided=item.divided)
        text = self._current.warning(type(self._dataset).__name__)
        if text is not None and self._shard.index == 0 and self._current.name not in self._said:
            self._said.add(self._current.name)
            warnings.warn(text, RuntimeWarning, stacklevel=2)

    def _looked_at(self, position: StreamPosition) -> None:
        self._position = position


def _size(dataset: object) -> int | None:
    try:
        return len(dataset)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError, AttributeError):
        return None

"""Dispatch source: rank 0 reads for all ranks (``dispatch_batches=True``)."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, final

from torch.utils.data import IterableDataset

from accel_data.dispatch.buffers import Blocks
from accel_data.dispatch.pipeline import READER, Dispatched, Message, Receiver, Sender, take
from accel_data.dispatch.scatter import ABSENT, Dealer, SliceFunction
from accel_data.loader_group import LoaderGroup, connect
from accel_data.options import LoaderOptions
from accel_data.order.cursor import Cursor, Step
from accel_data.source import Json, Pass, Source
from accel_state.errors import ConfigError, DataStateError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from accel_state.parallelism.config import DataShard


class _Facts(NamedTuple):
    """Metadata of one step, sent to every rank."""

    samples: int
    counts: tuple[int, ...] | None
    rows: int
    record: dict[str, Json]


@final
class DispatchSource(Source):
    """Rank 0 reads ``base`` and sends every rank its rows, ahead of the step and in parallel with it.

    ``base`` is the source of the full data (shard 0 of 1). It exists on every rank, for lengths and saved positions,
    but only rank 0 reads it. All ranks must leave the loop at the same batch. Reading runs in a thread: with
    ``num_workers=0`` a dataset that draws from global generators draws concurrently with the step; give such a dataset
    a worker.
    """

    reads_for_all = True

    def __init__(
        self,
        base: Source,
        shard: "DataShard",
        options: LoaderOptions,
        *,
        group: "ProcessGroup | None" = None,
        slice_fn: SliceFunction | None = None,
    ) -> None:
        loader = base.dataloader
        self._base, self._shard, self._group = base, shard, group
        self.dataloader, self.even_batches = loader, options.even_batches
        self.total_dataset_length = base.total_dataset_length
        rows = loader.batch_size
        if options.split_batches:
            if rows is None:
                raise ConfigError("split_batches needs a batch size: give the DataLoader batch_size, or drop it")
            from accel_data.iterable.stride import check_split

            check_split(rows, shard.count)
        self._dealer = Dealer(
            shards=shard.count,
            split=options.split_batches,
            even=options.even_batches,
            drop_last=bool(loader.drop_last),
            batch_rows=rows,
            has_rows=rows is not None or not isinstance(loader.dataset, IterableDataset),
            slice_fn=slice_fn,
        )
        self.total_batch_size = base.total_batch_size * self._dealer.takes
        self._peers: LoaderGroup | None = None
        self._leaving: Sender | Receiver | None = None
        self._record: dict[str, Json] | None = None
        self._dealt_with: dict[str, Json] = {}
        self.blocks = Blocks()
        self._passes = 0

    @property
    def read_amplification(self) -> int | None:
        return self._base.read_amplification

    def begin(self, cursor: Cursor) -> "DispatchPass":
        if self._peers is None:
            self._peers = self._connect()
        if self._leaving is not None and not self._leaving.close(None if self._peers is None else self._peers.patience):
            raise DataStateError("the pass before has not ended: some rank is still in the loop all others have left")
        self._leaving = None
        self._record = None
        self._passes += 1
        return DispatchPass(self, cursor, self._passes)

    def _connect(self) -> LoaderGroup | None:
        peers = connect(self, self._shard, self._group)
        if peers is None and self._shard.count > 1:
            raise ConfigError(
                f"dispatch_batches=True over {self._shard.count} ranks needs an open process group; open a Session "
                "(or torch.distributed) before the loader is read"
            )
        return peers

    def length(self, cursor: Cursor) -> int | None:
        batches = self._base.length(cursor)
        if batches is None or self._dealer.split:
            return batches
        full, rest = divmod(batches, self._shard.count)
        if self._dealer.drop_last or not rest:
            return full
        return full + int(self.even_batches or self._shard.index < rest)

    def skip(self, cursor: Cursor, batches: int) -> Cursor:
        return self._base.skip(cursor, batches * self._dealer.takes)

    @property
    def keeps_state(self) -> bool:
        return self._base.keeps_state

    @property
    def ends_together(self) -> bool:
        """Whether the last step ends the epoch on every rank; a stateful sampler is read to its end on rank 0 only."""
        return self.even_batches and not self._base.keeps_state

    def is_over(self, cursor: Cursor) -> bool:
        return self._base.is_over(cursor)

    def epoch_chosen(self) -> int | None:
        return self._base.epoch_chosen()

    def record(self, *, between: bool) -> dict[str, Json]:
        """Returns rank 0's record of the pass that is being read, because only rank 0 has read the data."""
        return self._base.record(between=between) if self._record is None else dict(self._record)

    def adapted(self, record: Mapping[str, Json], cursor: Cursor) -> tuple[Mapping[str, Json], Cursor]:
        return self._base.adapted(record, cursor)

    def restore(self, record: Mapping[str, Json], cursor: Cursor, private: Mapping[str, Any] | None) -> None:
        self._base.restore(record, cursor, private)
        self._record = None

    def undo(self) -> Callable[[], None]:
        own, base = super().undo(), self._base.undo()

        def undo() -> None:
            own()
            base()

        return undo

    def steps(self, start: Pass, cursor: Cursor) -> Iterator[Dispatched]:
        """Divides a pass of the base source into steps."""
        dealer = replace(self._dealer, even=self.even_batches)
        before = cursor.samples
        group: list[Any] = []
        rows: list[int] = []
        step = Step(cursor)
        for number, batch in enumerate(start.batches, 1):
            step = start.step(number)
            group.append(batch)
            rows.append(step.cursor.samples - before)
            before = step.cursor.samples
            if len(group) == dealer.takes:
                yield from self._deal(dealer, group, rows, step)
                group, rows = [], []
        if group:
            yield from self._deal(dealer, group, rows, step)

    def _deal(self, dealer: Dealer, group: list[Any], rows: list[int], step: Step) -> Iterator[Dispatched]:
        dealt = dealer.deal(group, rows)
        if dealt is not None:
            record = self._base.record(between=False)
            if record != self._dealt_with:
                self._dealt_with = record
            # Steps of a message share this object, so that it is sent once per message.
            facts = _Facts(step.cursor.samples, dealt.counts, dealt.rows, self._dealt_with)
            yield Dispatched(dealt.parts, facts, step.private)

    def leave(self, end: "Sender | Receiver") -> None:
        """Ends the threads of a pass; unfinished sends and receives continue in the background."""
        if not end.close():
            self._leaving = end


@final
class DispatchPass(Pass):
    """One pass over the batches that rank 0 reads."""

    def __init__(self, source: DispatchSource, cursor: Cursor, tag: int) -> None:
        """``tag`` distinguishes the messages of this pass from those of another pass in progress."""
        self._source, self._cursor, self._tag = source, cursor, tag
        self._end: Sender | Receiver | None = None
        self._base: Pass | None = None
        self._notes: deque[tuple[int, _Facts, Any]] = deque(maxlen=3)
        self.length = source.length(cursor)
        peers = source._peers
        private = None
        if peers is None or peers.rank == READER:
            self._base = source._base.begin(cursor)
            private = self._base.step(0).private
        # Taken before any lookahead, because afterwards the record of the base source is that of the batch read last.
        self._start = Step(cursor, private=private), source._base.record(between=False)
        self.batches = self._alone() if peers is None else self._together(peers)

    def _alone(self) -> Iterator[Any]:
        assert self._base is not None
        for number, step in enumerate(self._source.steps(self._base, self._cursor), 1):
            self._notes.append((number, step.shared, step.own))
            yield step.parts[0]
        self._finish()

    def _together(self, peers: LoaderGroup) -> Iterator[Any]:
        end = self._end = self._open(peers)
        number = 1
        while True:
            message = take(end, peers.patience, number, self.trouble)
            if message.kind == "end":
                self._finish()
                return
            for part, facts, own in self._content(message):
                if part is not ABSENT:
                    self._notes.append((number, facts, own))
                    yield part
                    number += 1

    def _finish(self) -> None:
        if self._notes:
            _, facts, _ = self._notes[-1]
            self.remainder = facts.rows % self._source.total_batch_size

    def _open(self, peers: LoaderGroup) -> "Sender | Receiver":
        end: Sender | Receiver
        if self._base is None:
            end = Receiver(peers, self._source.blocks, self._tag)
        else:
            greeting = tuple(self._cursor.state_dict().items())
            end = Sender(peers, self._source.steps(self._base, self._cursor), greeting, self._source.blocks, self._tag)
        end.start()
        return end

    def _content(self, message: Message) -> list[tuple[Any, _Facts, Any]]:
        greeting, steps = message.content
        if dict(greeting) != self._cursor.state_dict():
            raise DataStateError(
                f"rank {READER} reads from {dict(greeting)}, this rank is at {self._cursor.state_dict()}: load the "
                "same state and set the same epoch on every rank"
            )
        found: list[tuple[Any, _Facts, Any]] = steps
        return found

    @property
    def readers(self) -> Iterator[Any]:
        return self.batches if self._base is None else self._base.readers

    def step(self, number: int) -> Step:
        if number == 0:
            step, self._source._record = self._start
            return step
        facts, own = next((facts, own) for counted, facts, own in self._notes if counted == number)
        self._source._record = facts.record
        # Only the reading rank has, and needs, the private state of its dataset.
        return Step(Cursor(self._cursor.epoch, facts.samples), facts.counts, private=own)

    def close(self) -> None:
        super().close()
        if self._end is not None:
            self._source.leave(self._end)
        if self._base is not None and (self._end is None or self._source._leaving is None):
            self._base.close()

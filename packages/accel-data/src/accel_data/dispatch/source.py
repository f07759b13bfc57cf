"""Dispatch source: rank 0 reads for all ranks (``dispatch_batches=True``)."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, final

from accel_data.dispatch.buffers import Blocks
from accel_data.dispatch.epoch import DispatchPass, DispatchPlan, StepFacts
from accel_data.dispatch.pipeline import READER, Dispatched, Receiver, Sender
from accel_data.dispatch.scatter import Dealer
from accel_data.loader_group import LoaderGroup, connect
from accel_data.loader_spec import LoaderSpec
from accel_data.order.cursor import Cursor, Step
from accel_data.source import Json, Pass, Source
from accel_state.errors import ConfigError, DataStateError


@final
class DispatchSource(Source):
    """Rank 0 reads ``base`` and sends every rank its rows, ahead of the step and in parallel with it.

    ``base`` is the source of the full data (shard 0 of 1). It exists on every rank, for lengths and saved positions,
    but only rank 0 reads it. All ranks must leave the loop at the same batch. Reading runs in a thread: with
    ``num_workers=0`` a dataset that draws from global generators draws concurrently with the step; give such a dataset
    a worker.
    """

    reads_for_all = True

    def __init__(self, base: Source, spec: LoaderSpec) -> None:
        loader, shard, options = base.dataloader, spec.shard, spec.options
        self._base, self._shard, self._group = base, shard, spec.group
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
            slice_fn=spec.slice_fn,
        )
        self.total_batch_size = base.total_batch_size * self._dealer.takes
        self._peers: LoaderGroup | None = None
        self._leaving: tuple[Sender | Receiver, Callable[[], None]] | None = None
        self._record: dict[str, Json] | None = None
        self._record_behind: dict[str, Json] | None = None
        self._dealt_with: dict[str, Json] = {}
        self._blocks = Blocks()
        self._passes = 0

    @property
    def read_amplification(self) -> int | None:
        return self._base.read_amplification

    def begin(self, cursor: Cursor) -> DispatchPass:
        if self._peers is None:
            self._peers = self._connect()
        if self._leaving is not None:
            end, close_base = self._leaving
            if not end.close(None if self._peers is None else self._peers.patience):
                raise DataStateError(
                    "the pass before has not ended: some rank is still in the loop all others have left"
                )
            self._leaving = None
            close_base()
        self._record = self._record_behind = None
        self._passes += 1
        length, peers = self.length(cursor), self._peers
        base = self._base.begin(cursor) if peers is None or peers.rank == READER else None
        start = Step(cursor, private=None if base is None else base.step(0).private)
        plan = DispatchPlan(
            start=start,
            index=self._shard.index,
            tag=self._passes,
            length=length,
            step_rows=self.total_batch_size,
            record=self._base.record(between=False),
            peers=peers,
            blocks=self._blocks,
            base=base,
            steps=iter(()) if base is None else self._steps(base, cursor),
            ending=self._behind,
            looked_at=self._looked_at,
            left=self._left,
        )
        return DispatchPass(plan)

    def _connect(self) -> LoaderGroup | None:
        peers = connect(self, self._shard, self._group)
        if peers is None and self._shard.count > 1:
            raise ConfigError(
                f"dispatch_batches=True over {self._shard.count} ranks needs an open process group; open a Session "
                "(or torch.distributed) before the loader is read"
            )
        return peers

    def assign(self, name: str, value: object) -> None:
        self._base.assign(name, value)
        self.dataloader = self._base.dataloader

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
        return (self.even_batches or self._dealer.drop_last) and not self._base.keeps_state

    def is_over(self, cursor: Cursor) -> bool:
        return self._base.is_over(cursor)

    def epoch_chosen(self) -> int | None:
        return self._base.epoch_chosen()

    def announce(self, epoch: int) -> None:
        self._base.announce(epoch)

    def record(self, *, between: bool) -> dict[str, Json]:
        """Returns rank 0's record of the pass that is being read, or that has ended: only rank 0 has read the data."""
        known = self._record_behind if between and self._record_behind is not None else self._record
        return self._base.record(between=between) if known is None else dict(known)

    def adapted(self, record: Mapping[str, Json], cursor: Cursor) -> tuple[Mapping[str, Json], Cursor]:
        return self._base.adapted(record, cursor)

    def restore(self, record: Mapping[str, Json], cursor: Cursor, private: Mapping[str, Any] | None) -> None:
        self._base.restore(record, cursor, private)
        self._record = self._record_behind = None

    def undo(self) -> Callable[[], None]:
        own, base = super().undo(), self._base.undo()

        def undo() -> None:
            own()
            base()

        return undo

    def _steps(self, start: Pass, cursor: Cursor) -> Iterator[Dispatched]:
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
            if not _alike(record, self._dealt_with):
                self._dealt_with = record
            # Steps of a message share this object, so that it is sent once per message.
            facts = StepFacts(step.cursor.samples, dealt.counts, dealt.sizes, dealt.rows, self._dealt_with)
            yield Dispatched(dealt.parts, facts, step.private)

    def _behind(self) -> dict[str, Json] | None:
        """Returns the record behind a pass; None: it follows from that of the last step."""
        return self._base.record(between=True) if self._base.keeps_state else None

    def _looked_at(self, record: dict[str, Json]) -> None:
        self._record = record

    def _left(self, end: Sender | Receiver, close_base: Callable[[], None]) -> None:
        """Ends the thread of a pass, then what it reads; unfinished sends and receives continue in the background."""
        if end.close():
            close_base()
        else:
            self._leaving = end, close_base
        self._record_behind = end.behind


def _alike(one: dict[str, Json], other: dict[str, Json]) -> bool:
    """Whether two records are equal; False if that cannot be told, because a sampler's state has tensors or arrays."""
    try:
        return bool(one == other)
    except (RuntimeError, ValueError):
        return False

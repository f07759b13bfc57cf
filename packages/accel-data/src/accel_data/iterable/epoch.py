"""One pass over a stream, with the position behind each of its batches."""

from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, final

from accel_data.iterable.capabilities import ReadStrategy
from accel_data.iterable.lockstep import Lockstep, alone
from accel_data.iterable.readers import ReaderPool
from accel_data.iterable.reshard import ShardProgress
from accel_data.iterable.resume import POSITIONS_KEY, SNAPSHOTS_KEY, Readers, StreamPosition
from accel_data.iterable.worker import Delivered, Snapshot, Start
from accel_data.order.cursor import Cursor, Step
from accel_data.source import Pass


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class EpochPlan:
    """What a pass over a stream needs.

    Attributes:
        cursor: the first batch that is delivered.
        begun: the position at which the readers start.
        start: where each reader starts, which follows from ``begun``.
        strategy: how the readers share the dataset.
        readers: ranks and workers that read.
        pool: reads the streams of this rank.
        lockstep: gives ranks with streams of their own equally many steps; None: ranks know nothing of each other.
        length: see ``Pass.length``.
        initial_seed: see ``Pass.initial_seed``.
        dropped: batches that are read from ``begun`` on and not delivered, so that the first one is that at ``cursor``.
        opened: called with the first batch that was read.
        looked_at: called with each position that the loader looks at.
    """

    cursor: Cursor
    begun: StreamPosition
    start: Start
    strategy: ReadStrategy
    readers: Readers
    pool: ReaderPool
    lockstep: Lockstep | None
    length: int | None
    opened: Callable[[Delivered], None]
    looked_at: Callable[[StreamPosition], None]
    initial_seed: int | None = None
    dropped: int = 0


@final
class StreamEpoch(Pass):
    """One pass over a stream, from a plan."""

    def __init__(self, plan: EpochPlan) -> None:
        self.length, self.initial_seed = plan.length, plan.initial_seed
        self._plan, self._pool = plan, plan.pool
        start, workers = plan.start, max(plan.readers.workers, 1)
        # Of this rank's streams, by worker.
        self._positions = list(start.positions) if len(start.positions) > 1 else [start.positions[0]] * workers
        self._snapshots = list(start.snapshots) if len(start.snapshots) > 1 else [start.snapshots[0]] * workers
        self._turn, self._divided = start.turn, plan.begun.divided
        # The elements taken of every stream, as far as that is known.
        self._taken: list[int] | None = None
        self._at = plan.begun
        self._behind: deque[tuple[int, StreamPosition, Any]] = deque([(-plan.dropped, plan.begun, None)], maxlen=3)
        self._iterator: Iterator[Any] = iter(())
        self.batches = self._reading = self._read()

    @property
    def readers(self) -> Iterator[Any]:
        return self._iterator

    def close(self) -> None:
        reading = self._reading
        super().close()
        reading.close()
        self._pool.close(self._iterator)
        self._iterator = iter(())
        if self.delivered and not self.complete:
            self.rewind(next((at.private for number, at, _ in self._behind if number == self.delivered), None))

    def rewind(self, private: Mapping[str, Any] | None) -> None:
        """Only a dataset that this process reads has gone further than the loop."""
        if private is None or self._plan.readers.workers:
            return
        (stop,), (snapshot,) = private[POSITIONS_KEY], private[SNAPSHOTS_KEY]
        if snapshot is not None and stop < self._positions[0]:
            self._pool.rewind(Snapshot(*snapshot), stop, self._positions[0] - stop)

    def step(self, number: int) -> Step:
        if number == 0 and self._behind[-1][0] < 0:  # the batches to drop have not been read
            position, counts = self._plan.begun, None
        else:
            position, counts = next(facts for counted, *facts in reversed(self._behind) if counted == number)
        self._plan.looked_at(position)
        cursor, stride, rows = position.cursor if number else self._plan.cursor, self._pool.stride, None
        if counts is not None:
            rows = stride.batch_size if stride.even else counts[self._plan.readers.index]
        return Step(cursor, counts, rows, private=position.private)

    def _read(self) -> Generator[Any]:
        lockstep = self._plan.lockstep
        plan, stride, first, total = self._plan, self._pool.stride, 1 - self._plan.dropped, 0
        shards, strided = plan.readers.shards, plan.strategy.strided
        # Ranks that read the same stream draw the same numbers, because its order may be drawn, too.
        self._iterator = items = self._pool.open(0 if strided else plan.readers.index, plan.initial_seed)
        steps = alone(items) if lockstep is None else lockstep.run(items, self._pool.first_batch)
        for number, (item, is_new, facts) in enumerate(steps, first):
            if is_new:
                self._advance(item)
            if number == first:
                self._taken = self._taken_before()
                if is_new:
                    plan.opened(item)
            if facts is not None:
                total, counts = sum(max(rows, 0) for rows, _, _ in facts), None
                full, turn = min(rows for rows, _, _ in facts) == stride.batch_size, facts[0][1] + 1
                if not full:
                    counts = tuple(max(rows, 0) for rows, _, _ in facts)
                self._take(facts)
            else:  # Without messages from the others their streams are taken to be like this one.
                total = item.part[1] * (1 if strided else shards)
                counts, full, turn = self._real_rows(total), True, self._turn
                self._take_alike()
            self._keep(number, self._at.cursor.samples + total, counts, turn % len(self._positions), full=full)
            if number > 0:
                yield item.batch
        if lockstep is not None or strided or shards == 1:
            self.remainder = total % (stride.batch_size * shards)

    def _take(self, facts: list[tuple[int, int, int]]) -> None:
        if self._taken is not None:
            workers = len(self._taken) // len(facts)
            for shard, (rows, worker, stop) in enumerate(facts):
                if rows >= 0:
                    self._taken[shard * workers + (worker if self._divided else 0)] = stop

    def _take_alike(self) -> None:
        if self._taken is not None and self._plan.strategy.strided:
            self._taken = self._positions[: len(self._taken)]
        elif self._taken is not None and self._divided and len(self._positions) > 1:
            self._taken = None
        elif self._taken is not None:
            self._taken = [count + self._pool.stride.batch_size for count in self._taken]

    def _advance(self, item: Delivered) -> None:
        """Counts a batch of this rank's streams."""
        self._divided, worker = item.divided, item.worker if item.divided else 0
        self._positions[worker] = item.part[2]
        if item.snapshot is not None:
            self._snapshots[worker] = item.snapshot
        self._turn = (item.worker + 1) % len(self._positions)

    def _taken_before(self) -> list[int] | None:
        """Elements taken of every stream before the pass; None where one stream is read by all, or it is unknown."""
        plan, mode = self._plan, self._plan.strategy.mode
        shards = plan.readers.shards if mode == "native" else 1
        if mode not in ("native", "stride") or (shards == 1 and not self._divided):
            return None
        if plan.begun.progress is not None:
            return list(plan.begun.progress.taken)
        if plan.begun.cursor.samples and self._divided:
            return None
        return [plan.start.positions[0]] * (shards * (plan.readers.workers if self._divided else 1))

    def _real_rows(self, group_real: int) -> tuple[int, ...] | None:
        """Real rows by data rank of a group cut from one stream; None when it is full, or others have other streams."""
        stride = self._pool.stride
        if stride.shards == 1 or group_real == stride.group_size:
            return None
        cuts = (group_real - index * stride.batch_size for index in range(stride.shards))
        absent = 0 if stride.even else -1
        return tuple(min(cut, stride.batch_size) if cut > 0 else absent for cut in cuts)

    def _keep(self, number: int, samples: int, counts: tuple[int, ...] | None, turn: int, *, full: bool) -> None:
        """Notes the position behind a batch of all ranks; ``turn``: the worker of rank 0 that is read next."""
        plan, mode, divided = self._plan, self._plan.strategy.mode, self._divided
        cursor, before = Cursor(plan.cursor.epoch, samples), self._at
        if mode == "left":
            self._at = replace(before, cursor=cursor, mode=mode, readers=plan.readers, private=None)
        else:
            progress = private = None
            if self._taken is not None:
                shards, chunk = plan.readers.shards if mode == "native" else 1, self._pool.stride.group_size
                workers, taken = len(self._taken) // shards, tuple(self._taken)
                progress = ShardProgress(shards, workers, chunk, taken, turn if divided else 0, samples, seated=divided)
            if mode != "stride" or divided or any(self._snapshots):
                used = slice(None if divided else 1)
                private = plan.readers.private(self._positions[used], self._snapshots[used], self._turn)
            level = before.level and full
            self._at = StreamPosition(cursor, mode, plan.readers, divided, level, progress, private)
        self._behind.append((number, self._at, counts))

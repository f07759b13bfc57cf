"""The index batches of one rank in one pass, and the facts of each step.

A walk is what our batch sampler iterates. ``OrderWalk`` computes positions; ``ItemWalk`` counts through a sampler that
only its owner understands. ``accel_data.map.sampler_stream`` has those over whole batches and over a user's function.
"""

import dataclasses
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import islice
from typing import Any, Protocol, final

import torch

from accel_data.map.global_rng import drawn
from accel_data.map.index_agreement import IndexTrail
from accel_data.map.sharding import UNKNOWN_TOTAL, ByIndex, Elastic, Sharding, batches_of, real_counts, wrap
from accel_data.order.cursor import Cursor, Step
from accel_data.order.orders import Epoch
from accel_state.errors import DataError, DataStateError
from accel_state.parallelism.config import DataShard

_SECOND_CHUNK, _LARGEST_CHUNK = 256, 16384
_INDICES_AHEAD = 1024
"""How many indices of a sampler of the user's are made before they are needed, at most."""


class Walk(Protocol):
    """This rank's index batches from a cursor to the end of its epoch."""

    @property
    def length(self) -> int | None:
        """How many batches there will be, if that is known."""

    @property
    def exact(self) -> bool:
        """``length`` is computed, not told by somebody else."""

    @property
    def remainder(self) -> int:
        """Real samples in the last step over all ranks; 0: it is full, -1: not known yet."""

    def batches(self) -> Iterator[list[Any]]:
        """The index batches; read ahead of what is delivered."""

    def position(self, number: int) -> int:
        """Samples of the epoch before the batch that follows the ``number``-th; asked when that batch has been made."""

    def step(self, number: int) -> Step:
        """The facts after the ``number``-th batch was delivered; 0: before the first."""


def sharded_step(sharding: Sharding, start: Cursor, number: int, shard: DataShard) -> Step:
    """The facts of a step of which everything can be computed."""
    cursor = Cursor(start.epoch, sharding.seek(start.samples, number))
    if number == 0:
        return Step(cursor)
    position = sharding.seek(start.samples, number - 1)
    counts = real_counts(sharding, position, shard.count)
    return Step(cursor, counts, sharding.window(position, shard.index))


def last_remainder(sharding: Sharding, start: int, num_ranks: int) -> int:
    """Real samples in the last step, 0 when every rank's batch is as full as in any other."""
    steps = sharding.steps(start)
    if not steps:
        return 0
    last = sharding.seek(start, steps - 1)
    if sharding.run(last) or sharding.window(last, 0) is not None:
        return 0
    return sum(max(count, 0) for count in real_counts(sharding, last, num_ranks))


@final
class OrderWalk:
    """Batches of an order with random access: nothing is walked, a resumed pass starts as fast as any other."""

    def __init__(
        self, order: Epoch, sharding: Sharding, *, start: Cursor, shard: DataShard, num_nodes: int = 1
    ) -> None:
        self._order, self._sharding = order, sharding
        self._start, self._shard, self._nodes = start, shard, num_nodes
        self.exact = True
        self.length = batches_of(sharding, start.samples, shard.index)

    @property
    def remainder(self) -> int:
        """Computed."""
        return last_remainder(self._sharding, self._start.samples, self._shard.count)

    def position(self, number: int) -> int:
        """Computed."""
        return self._sharding.seek(self._start.samples, number)

    def step(self, number: int) -> Step:
        """Computed."""
        return sharded_step(self._sharding, self._start, number, self._shard)

    def batches(self) -> Iterator[list[int]]:
        """Index lists, computed for some hundred batches at a time."""
        position, left = self._start.samples, self.length
        # The first batch alone: it is what a resumed run waits for.
        chunk = 1
        while left:
            run = min(self._sharding.run(position), left)
            if run:
                rows = self._sharding.rows(position, self._shard.index)
                assert rows is not None
                run = min(run, max(chunk // rows.count, 1))
                shift = self._sharding.seek(position, 1) - position
                yield from self._order.lists(rows.positions(), shift=shift, steps=run)
            else:
                run = min(left, max(chunk // 32, 1))
                yield from self._single(position, run)
            position = self._sharding.seek(position, run)
            left -= run
            chunk = min(max(chunk * 4, _SECOND_CHUNK), _LARGEST_CHUNK)

    def _single(self, position: int, steps: int) -> Iterator[list[int]]:
        """Steps that differ from each other, still as one look-up."""
        total = self._sharding.total
        positions: list[int] = []
        sizes: list[int] = []
        for _ in range(steps):
            rows = self._sharding.rows(position, self._shard.index)
            assert rows is not None
            positions.extend(wrap(p, total, self._nodes) for p in rows.positions())
            sizes.append(rows.count)
            position = self._sharding.seek(position, 1)
        indices = iter(self._order.take(torch.tensor(positions, dtype=torch.int64)).tolist())
        return iter([list(islice(indices, size)) for size in sizes])


@final
class ItemWalk:
    """Batches cut from a sampler of the user's, whose indices every rank walks in step.

    The sampler must give the same indices on every rank, and again when the epoch is resumed; its code runs inside
    ``rng``, so that one which draws from the global generators does.
    """

    def __init__(
        self,
        sampler: Iterable[Any],
        sharding: ByIndex | Elastic,
        *,
        start: Cursor,
        shard: DataShard,
        size: int | None,
        rng: AbstractContextManager[None],
        trail: IndexTrail | None = None,
    ) -> None:
        self._sampler, self._rng, self._trail = sampler, rng, trail
        self.exact = False
        self._start, self._shard, self._size = start, shard, size
        self._planned = dataclasses.replace(sharding, total=sized(sampler) or 0) if sized(sampler) is not None else None
        self._sharding: ByIndex | Elastic = dataclasses.replace(sharding, total=UNKNOWN_TOTAL)

    @property
    def length(self) -> int | None:
        """From the sampler's ``len``, where it has one."""
        if self._planned is None:
            return None
        return batches_of(self._planned, self._start.samples, self._shard.index)

    @property
    def remainder(self) -> int:
        """From the sampler's ``len`` or, once it is reached, its end."""
        known = self._sharding if self._sharding.total < UNKNOWN_TOTAL else self._planned
        return -1 if known is None else last_remainder(known, self._start.samples, self._shard.count)

    def position(self, number: int) -> int:
        """Computed."""
        return self._sharding.seek(self._start.samples, number)

    def step(self, number: int) -> Step:
        """Computed; a short last step is known by the time its batch was made."""
        return sharded_step(self._sharding, self._start, number, self._shard)

    def batches(self) -> Iterator[list[Any]]:
        """Reads what all ranks take, keeps this rank's part."""
        size = self._sharding.seek(0, 1) if isinstance(self._sharding, ByIndex) else self._sharding.global_batch
        position = self._start.samples
        items = drawn(self._sampler, self._rng, limit=_INDICES_AHEAD)
        head, buffer = skip_items(items, position, size)
        buffer += islice(items, size - position % size if isinstance(self._sharding, Elastic) else size)
        while True:
            if len(buffer) < size - (position % size if isinstance(self._sharding, Elastic) else 0):
                self._sharding = dataclasses.replace(self._sharding, total=position + len(buffer))
            check_indices(buffer, self._size)
            if self._trail is not None:
                self._trail.add((buffer,))
                self._trail.complete = self._sharding.total < UNKNOWN_TOTAL
            head += buffer[: size - len(head)]
            first, end = position, position + len(buffer)
            while position < end and self._sharding.steps(position):
                rows = self._sharding.rows(position, self._shard.index)
                if rows is not None:
                    yield [buffer[p - first] if p < end else head[(p - end) % len(head)] for p in rows.positions()]
                position = self._sharding.seek(position, 1)
            if self._sharding.total < UNKNOWN_TOTAL:
                return
            buffer = list(islice(items, size))


def skip_items(items: Iterator[Any], number: int, keep: int) -> tuple[list[Any], list[Any]]:
    """Reads ``number`` items and returns the first ``keep`` of them, and an empty buffer for what follows.

    Raises ``DataStateError`` when there are not that many.
    """
    head = list(islice(items, min(number, keep)))
    counter = deque(enumerate(islice(items, number - len(head)), 1), maxlen=1)
    given = len(head) + (counter[0][0] if counter else 0)
    if given < number:
        raise DataStateError(
            f"the saved position is sample {number}, but the sampler gives only {given} indices in this epoch: it is "
            "not the sampler, or not the dataset, that the position was saved with"
        )
    return head, []


def check_indices(indices: Sequence[Any], size: int | None) -> None:
    """Raises ``DataError`` for an index outside of a dataset of ``size`` samples; keys of other kinds are not judged.

    Every rank checks the indices of all ranks, so all of them raise.
    """
    if size is None or not indices:
        return
    try:
        smallest, largest = min(indices), max(indices)
        wrong = largest if largest >= size else smallest if smallest < -size else None
    except TypeError:
        return
    if wrong is not None:
        raise DataError(f"the sampler gave index {wrong}, but the dataset has {size} samples: 0 to {size - 1}")


def sized(items: object) -> int | None:
    """``len(items)``, or None when it has none, or refuses."""
    try:
        return len(items)  # type: ignore[arg-type]
    except (TypeError, RuntimeError):
        return None

"""Index streams: the index batches of one rank in one epoch, and the facts of each step.

accel's batch sampler iterates over an ``IndexStream``. ``OrderStream`` computes positions; ``ItemStream`` iterates
over a user's sampler. ``accel_data.map.sampler_stream`` has the streams of batch samplers and of sharding functions.
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
"""Upper limit of indices that are drawn ahead from a user's sampler."""


class IndexStream(Protocol):
    """Index stream: this rank's index batches from a cursor to the end of its epoch."""

    @property
    def length(self) -> int | None:
        """Number of batches, if known."""

    @property
    def exact(self) -> bool:
        """Whether ``length`` is computed, rather than taken from a user's object."""

    @property
    def remainder(self) -> int:
        """Real samples in the last step over all ranks; 0: the step is full, -1: not known yet."""

    def batches(self) -> Iterator[list[Any]]:
        """Yields the index batches; they are drawn ahead of delivery."""

    def position(self, number: int) -> int:
        """Returns the number of samples before the batch after the ``number``-th; called once that batch is drawn."""

    def step(self, number: int) -> Step:
        """Returns the facts after the ``number``-th batch was delivered; 0: before the first."""


def sharded_step(sharding: Sharding, start: Cursor, number: int, shard: DataShard) -> Step:
    """Computes the facts of a step."""
    cursor = Cursor(start.epoch, sharding.seek(start.samples, number))
    if number == 0:
        return Step(cursor)
    position = sharding.seek(start.samples, number - 1)
    counts, own = real_counts(sharding, position, shard.count), sharding.rows(position, shard.index)
    return Step(cursor, counts, None if own is None else own.count, sharding.window(position, shard.index))


def last_remainder(sharding: Sharding, start: int, num_ranks: int) -> int:
    """Returns the real samples in the last step; 0 if every rank's batch is as full as in other steps."""
    steps = sharding.steps(start)
    if not steps:
        return 0
    last = sharding.seek(start, steps - 1)
    if sharding.run(last) or sharding.window(last, 0) is not None:
        return 0
    return sum(max(count, 0) for count in real_counts(sharding, last, num_ranks))


@final
class OrderStream:
    """Index stream of an order with random access: it skips nothing, so a resumed pass starts as fast as a new one."""

    def __init__(
        self, order: Epoch, sharding: Sharding, *, start: Cursor, shard: DataShard, num_nodes: int = 1
    ) -> None:
        self._order, self._sharding = order, sharding
        self._start, self._shard, self._nodes = start, shard, num_nodes
        self.exact = True
        self.length = batches_of(sharding, start.samples, shard.index)

    @property
    def remainder(self) -> int:
        """Computed from the sharding."""
        return last_remainder(self._sharding, self._start.samples, self._shard.count)

    def position(self, number: int) -> int:
        """Computes the position from the sharding."""
        return self._sharding.seek(self._start.samples, number)

    def step(self, number: int) -> Step:
        """Computes the facts from the sharding."""
        return sharded_step(self._sharding, self._start, number, self._shard)

    def batches(self) -> Iterator[list[int]]:
        """Yields index lists, computed for several hundred batches at a time."""
        position, left = self._start.samples, self.length
        # The first batch alone, because a resumed run waits for it.
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
        """Yields steps that differ from each other, computed with one lookup."""
        total = self._sharding.total
        positions: list[int] = []
        sizes: list[int] = []
        for _ in range(steps):
            rows = self._sharding.rows(position, self._shard.index)
            assert rows is not None
            positions.extend(wrap(p, total, self._nodes) for p in rows.positions())
            sizes.append(rows.count)
            position = self._sharding.seek(position, 1)
        indices = iter(self._order.take(torch.tensor(positions, dtype=torch.int64, device="cpu")).tolist())
        return iter([list(islice(indices, size)) for size in sizes])


@final
class ItemStream:
    """Index stream from a user's sampler, over which every rank iterates in full.

    The sampler must yield the same indices on every rank, and again when the epoch is resumed. Its code runs inside
    ``rng``, so that a sampler that draws from the global generators does so.
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
        """Computed from the sampler's ``len``, if it has one."""
        if self._planned is None:
            return None
        return batches_of(self._planned, self._start.samples, self._shard.index)

    @property
    def remainder(self) -> int:
        """Computed from the sampler's ``len`` or, once reached, from its end."""
        known = self._sharding if self._sharding.total < UNKNOWN_TOTAL else self._planned
        return -1 if known is None else last_remainder(known, self._start.samples, self._shard.count)

    def position(self, number: int) -> int:
        """Computes the position from the sharding."""
        return self._sharding.seek(self._start.samples, number)

    def step(self, number: int) -> Step:
        """Computes the facts; a short last step is known once its batch is drawn."""
        return sharded_step(self._sharding, self._start, number, self._shard)

    def batches(self) -> Iterator[list[Any]]:
        """Draws the indices of all ranks and yields this rank's."""
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
    """Skips ``number`` items; returns the first ``keep`` of them, and an empty buffer for the following ones.

    Raises ``DataStateError`` if there are fewer items.
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
    """Raises ``DataError`` for an index outside of a dataset of ``size`` samples; keys of other types are not checked.

    Every rank checks the indices of all ranks, so all ranks raise.
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
    """Returns ``len(items)``, or None if ``items`` has no length."""
    try:
        return len(items)  # type: ignore[arg-type]
    except (TypeError, RuntimeError):
        return None

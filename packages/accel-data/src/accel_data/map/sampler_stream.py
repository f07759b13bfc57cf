"""Index streams whose steps cannot be computed beforehand: of a user's batch sampler, and of a sharding function.

They record the facts of the steps that may still be delivered: as many as workers can have read ahead.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import chain, cycle, islice, pairwise
from typing import Any, NamedTuple, final

import torch

from accel_data.map.global_rng import drawn
from accel_data.map.index_agreement import IndexTrail
from accel_data.map.index_stream import check_indices, sized
from accel_data.map.sharding import wrap
from accel_data.order.cursor import Cursor, ShardFunction, Share, Step
from accel_data.order.orders import Epoch
from accel_state.errors import DataError, DataStateError
from accel_state.parallelism.config import DataShard

_BATCHES_AHEAD = 64
"""Upper limit of batches that are drawn ahead from a user's batch sampler."""

Part = tuple[list[Any], int] | None
"""A rank's indices in a round and the number of real ones, or None if the rank has no batch."""


class DrawnRows(NamedTuple):
    """Rules by which batches of a batch sampler are divided over the ranks in rounds."""

    num_ranks: int
    batch_size: int | None
    """Size of one batch of the sampler; None: batches have any size."""
    split: bool = False
    even: bool = True
    drop_last: bool = False

    @property
    def round_size(self) -> int:
        """Number of batches of the sampler in one step."""
        return 1 if self.split else self.num_ranks

    @property
    def least(self) -> int:
        """Rows that a batch needs for one row per rank; shorter batches are concatenated with the following ones."""
        return self.num_ranks if self.split and not self.even else 0


class Round(NamedTuple):
    """Batches of one step of all ranks, how many batches of the sampler they are, and whether they are the last."""

    batches: list[list[Any]]
    taken: int
    last: bool


def rounds_in(stream: Iterator[list[Any]], cut: DrawnRows, rest: list[Any] | None) -> Iterator[Round]:
    """Yields the rounds of a batch sampler; ``rest``: the rest of a batch, which comes first."""
    following = rest if rest is not None else next(stream, None)
    while following is not None:
        group = [following, *islice(stream, cut.round_size - 1)]
        taken, following = len(group), next(stream, None) if len(group) == cut.round_size else None
        while following is not None and len(group[0]) < cut.least:
            group[0] = [*group[0], *following]
            taken, following = taken + 1, next(stream, None)
        yield Round(group, taken, following is None)


def deal(group: list[list[Any]], head: list[list[Any]], cut: DrawnRows, *, final: bool) -> list[Part]:
    """Returns each rank's indices in a round of up to ``num_ranks`` batches, or with ``split`` of one batch.

    ``head`` holds the first batches of the epoch, which pad the ``final`` round or, with ``split``, a short batch.
    """
    if cut.split:
        return _slices(group[0], head, cut, final=final)
    parts: list[Part] = [(batch, len(batch)) for batch in group]
    if not final or cut.num_ranks == 1:
        return parts
    missing = cut.num_ranks - len(group)
    if missing and cut.drop_last:
        return []
    if not cut.even:
        return parts + [None] * missing
    if cut.batch_size is None:
        return parts + [(batch, 0) for batch in islice(cycle(head), missing)]
    size, filler = cut.batch_size, cycle(chain.from_iterable(head))
    filled: list[Part] = [(batch + list(islice(filler, max(size - len(batch), 0))), len(batch)) for batch in group]
    return filled + [(list(islice(filler, size)), 0) for _ in range(missing)]


def _slices(batch: list[Any], head: list[list[Any]], cut: DrawnRows, *, final: bool) -> list[Part]:
    """Splits one global batch into equal slices, or a batch of another size into slices as equal as possible.

    A rank may be without a slice only in the ``final`` step of an epoch without ``even_batches``; in any other step it
    would be one step behind the other ranks from then on.
    """
    assert cut.batch_size is not None
    ranks, real = cut.num_ranks, len(batch)
    if cut.even and ranks > 1:
        full = max(cut.batch_size, -(-real // ranks) * ranks)
        batch = batch + list(islice(cycle(chain.from_iterable(head)), full - real))
        ends = [full // ranks * rank for rank in range(ranks + 1)]
    elif final and real <= cut.batch_size:
        ends = [min(cut.batch_size // ranks * rank, real) for rank in range(ranks + 1)]
    else:
        ends = [real * rank // ranks for rank in range(ranks + 1)]
    slices = [(batch[first:after], first) for first, after in pairwise(ends)]
    return [(rows, min(max(real - first, 0), len(rows))) if rows else None for rows, first in slices]


def rounds_of(batches: int, cut: DrawnRows, rank: int, *, last: int | None = None) -> int:
    """Returns the number of batches of ``batches`` for ``rank``; ``last`` is the size of the last one, if known."""
    full, rest = divmod(batches, cut.round_size)
    if cut.split:
        assert cut.batch_size is not None
        absent = last is not None and not cut.even and rank * (cut.batch_size // cut.num_ranks) >= last
        return full - (absent and full > 0)
    if not rest or cut.drop_last:
        return full
    return full + (cut.even or rank < rest)


def last_batch_size(batch_sampler: object) -> int | None:
    """Returns the size of the last batch of a sampler that batches a sized one without dropping; None if unknown."""
    size, items = getattr(batch_sampler, "batch_size", None), sized(getattr(batch_sampler, "sampler", None))
    if not isinstance(size, int) or not items or getattr(batch_sampler, "drop_last", False):
        return None
    return items % size or size


@final
class BatchSamplerStream:
    """Index stream of a user's batch sampler, divided in rounds; every rank iterates over all of its batches.

    A saved position inside a batch (saved with another batch size) starts with the rest of that batch.
    """

    def __init__(
        self,
        batch_sampler: Iterable[Sequence[Any]],
        cut: DrawnRows,
        *,
        start: Cursor,
        shard: DataShard,
        size: int | None,
        rng: AbstractContextManager[None],
        ahead: int,
        trail: IndexTrail | None = None,
    ) -> None:
        self._trail = trail
        self._sampler, self._cut, self._rng = batch_sampler, cut, rng
        self.exact = False
        self._start, self._shard, self._size = start, shard, size
        self._steps: deque[tuple[int, Step]] = deque([(0, Step(start))], maxlen=ahead + 3)
        self._passed: int | None = None if start.samples else 0
        self.remainder = -1

    @property
    def length(self) -> int | None:
        """Computed from the sampler's ``len``, once the number of batches before the start is known."""
        batches = sized(self._sampler)
        if batches is None or self._passed is None:
            return None
        last = last_batch_size(self._sampler)
        return rounds_of(max(batches - self._passed, 0), self._cut, self._shard.index, last=last)

    def position(self, number: int) -> int:
        """Returns the recorded position."""
        return recorded_step(self._steps, number).cursor.samples

    def step(self, number: int) -> Step:
        """Returns the facts recorded when the batch was drawn."""
        return recorded_step(self._steps, number)

    def batches(self) -> Iterator[list[Any]]:
        """Draws the batches of a round and yields this rank's."""
        size = self._cut.round_size
        stream = drawn(_Lists(self._sampler), self._rng, limit=_BATCHES_AHEAD)
        head, rest, self._passed = skip_batches(stream, self._start.samples, keep=size)
        number, samples = 0, self._start.samples
        for group, taken, is_last in rounds_in(stream, self._cut, rest):
            self._passed += taken - len(group)
            for batch in group:
                check_indices(batch, self._size)
            if self._trail is not None:
                self._trail.add(group)
                self._trail.complete = is_last
            head += group[: size - len(head)]
            parts = deal(group, head, self._cut, final=is_last)
            if not parts:
                self.remainder = 0
                return
            number, samples = number + 1, samples + sum(len(batch) for batch in group)
            counts = tuple(-1 if part is None else part[1] for part in parts)
            if is_last:
                is_full = all(part is not None and part[1] == len(part[0]) for part in parts)
                self.remainder = 0 if is_full else sum(max(count, 0) for count in counts)
            part = parts[self._shard.index]
            rows = None if part is None else len(part[0])
            self._steps.append((number, Step(Cursor(self._start.epoch, samples), counts, rows)))
            if part is not None:
                yield part[0]
        if number == 0:
            self.remainder = 0


@final
class _Lists:
    """Copies each batch of a sampler as it is drawn, because some samplers reuse one list for all batches."""

    def __init__(self, batch_sampler: Iterable[Sequence[Any]]) -> None:
        self._sampler = batch_sampler

    def __iter__(self) -> Iterator[list[Any]]:
        return map(list, self._sampler)


def recorded_step(steps: Iterable[tuple[int, Step]], number: int) -> Step:
    """Returns the facts recorded for batch ``number``."""
    for recorded, step in steps:
        if recorded == number:
            return step
    raise AssertionError(f"the facts of batch {number} are gone: more was read ahead than the loader said it would")


def skip_batches(
    stream: Iterator[Sequence[Any]], samples: int, *, keep: int = 0
) -> tuple[list[list[Any]], list[Any] | None, int]:
    """Skips batches until ``samples`` indices have passed.

    Returns the first ``keep`` batches, the rest of a batch if ``samples`` lies inside it, and the number of full
    batches that passed. Raises ``DataStateError`` if the stream ends before.
    """
    head: list[list[Any]] = []
    passed = seen = 0
    while seen < samples:
        batch = next(stream, None)
        if batch is None:
            raise DataStateError(
                f"the saved position is sample {samples}, but the batch sampler gives only {seen} indices in this "
                "epoch: it is not the sampler, or not the dataset, that the position was saved with"
            )
        if len(head) < keep:
            head.append(list(batch))
        seen += len(batch)
        if seen > samples:
            return head, list(batch[len(batch) - (seen - samples) :]), passed
        passed += 1
    return head, None, passed


@final
class FunctionStream:
    """Index stream of a user's sharding function, called step by step with (cursor, shard)."""

    def __init__(self, order: Epoch, function: ShardFunction, *, start: Cursor, shard: DataShard, ahead: int) -> None:
        self._order, self._function = order, function
        self._start, self._shard = start, shard
        self._cursors: deque[tuple[int, Cursor, Cursor]] = deque([(0, start, start)], maxlen=ahead + 3)
        self.length: int | None = None
        self.exact = False
        self.remainder = -1

    def position(self, number: int) -> int:
        """Returns the recorded position."""
        return next(before.samples for recorded, before, _ in self._cursors if recorded == number + 1)

    def step(self, number: int) -> Step:
        """Returns the recorded cursor; calls the function for the real counts of the other ranks."""
        for recorded, before, after in self._cursors:
            if recorded == number:
                if number == 0:
                    return Step(after)
                own = self._function(before, self._shard)
                counts = tuple(self._real(before, rank) for rank in range(self._shard.count))
                return Step(after, counts, None if own is None else len(own.positions))
        raise AssertionError(f"the facts of batch {number} are gone: more was read ahead than the loader said it would")

    def _real(self, cursor: Cursor, rank: int) -> int:
        share = self._function(cursor, DataShard(rank, self._shard.count))
        if share is None or not share.positions:
            return -1
        return len(share.positions) if share.real is None else share.real

    def batches(self) -> Iterator[list[int]]:
        """Calls the function until it returns None at the end of the epoch."""
        cursor, number, total = self._start, 0, len(self._order)
        while (share := self._function(cursor, self._shard)) is not None:
            after = Cursor(cursor.epoch, self._checked(share, cursor, total))
            if share.positions:
                number += 1
                self._cursors.append((number, cursor, after))
                positions = torch.tensor([wrap(p, total) for p in share.positions], dtype=torch.int64, device="cpu")
                yield self._order.take(positions).tolist()
            cursor = after

    @staticmethod
    def _checked(share: Share, cursor: Cursor, total: int) -> int:
        """Returns the position after the step; raises if the function does not advance or passes the end."""
        after = cursor.samples + share.advance
        if share.advance < 1 or after > total:
            raise DataError(
                f"the sharding function advances by {share.advance} from sample {cursor.samples} of {total}; a step "
                f"must take at least 1 and at most the {total - cursor.samples} that are left (None ends the epoch)"
            )
        return after

"""Strides: the elements of a stream that each reader keeps, when every reader reads the same stream."""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, islice
from typing import Any, NamedTuple, final

from accel_state.errors import ConfigError


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Stride:
    """The part of a stream that one reader keeps, and how the end of the stream is treated.

    The stream is cut into groups of ``shards * batch_size`` elements. Shard ``index`` gets slice ``index`` of every
    group; of these, its worker ``worker`` makes groups ``worker, worker + workers, ...``. A loader takes from its
    workers in turn, so what a shard receives does not depend on how many workers it has. ``even`` completes the last
    group with elements of the first, so that all shards get equally many.
    """

    batch_size: int = 1
    shards: int = 1
    index: int = 0
    workers: int = 1
    worker: int = 0
    drop_last: bool = False
    even: bool = True

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ConfigError(f"batch_size is {self.batch_size}; it must be at least 1")
        if not 0 <= self.index < self.shards:
            raise ConfigError(f"index is {self.index}; it must be from 0 to shards - 1 = {self.shards - 1}")
        if not 0 <= self.worker < self.workers:
            raise ConfigError(f"worker is {self.worker}; it must be from 0 to workers - 1 = {self.workers - 1}")

    @property
    def group_size(self) -> int:
        """Elements of the stream that all shards together take for one batch each."""
        return self.batch_size * self.shards

    def length(self, elements: int) -> int:
        """How many elements this shard gets, over all its workers, from a stream of ``elements``."""
        full, rest = divmod(elements, self.group_size)
        if not rest or self.drop_last:
            tail = 0
        elif self.even:
            tail = self.batch_size
        else:
            tail = min(max(rest - self.index * self.batch_size, 0), self.batch_size)
        return full * self.batch_size + tail


class StridePart(NamedTuple):
    """One batch worth of elements of one reader, padding included.

    The first ``real`` are not padding. The full group holds ``group_real`` elements of the stream, over all shards, and
    the next group begins behind ``stop`` elements of it, skipped ones included.
    """

    elements: list[Any]
    real: int
    group_real: int
    stop: int


def parts(stream: Iterable[Any], stride: Stride, *, skip: int = 0, front: Sequence[Any] = ()) -> Iterator[StridePart]:
    """The batches of one reader, after ``skip`` elements of ``stream`` that were delivered before.

    Groups are cut from element ``skip`` on, so a stream that was left with one number of shards goes on with another
    and no element is read twice or lost. ``front``: the first group of the epoch, where ``stream`` begins behind it.
    Memory: one group, and the first one for the padding of the last.
    """
    elements = iter(stream)
    size = stride.group_size
    read = [] if front else list(islice(elements, min(skip, size)))
    deque(islice(elements, skip - len(read)), maxlen=0)
    first = [*front, *read]
    stop = skip
    for turn in count():
        group = list(islice(elements, size))
        first += group[: size - len(first)]
        stop += len(group)
        if turn % stride.workers == stride.worker:
            part = _part(group, first, stride, stop)
            if part is not None:
                yield part
        if len(group) < size:
            return


def _part(group: list[Any], first: list[Any], stride: Stride, stop: int) -> StridePart | None:
    """This shard's slice of a group, completed or dropped when the stream ended inside the group."""
    start = stride.index * stride.batch_size
    kept = group[start : start + stride.batch_size]
    if len(group) == stride.group_size:
        return StridePart(kept, len(kept), len(group), stop)
    if not group or stride.drop_last or not (kept or stride.even):
        return None
    filling = range(start + len(kept) - len(group), start + stride.batch_size - len(group)) if stride.even else ()
    return StridePart(kept + [first[i % len(first)] for i in filling], len(kept), len(group), stop)


def check_split(batch_size: int, shards: int) -> int:
    """The elements per shard of a global batch of ``batch_size``; 1 means that a shard's elements come one by one.

    Raises ``ConfigError`` when the batch cannot be cut into equal parts.
    """
    if batch_size > 1 and batch_size % shards:
        lower = batch_size - batch_size % shards
        nearest = f"{lower} or {lower + shards}" if lower else str(shards)
        raise ConfigError(
            f"with split_batches the batch size must be a round multiple of the number of shards: {batch_size} is not "
            f"a multiple of {shards}; the nearest that work: {nearest}"
        )
    return max(batch_size // shards, 1)

"""The box of a tensor that each rank holds, and the rank that writes it: arithmetic without tensors or groups.

A rank's share of one dimension is a list of half-open intervals in the order in which they lie in its memory. One
interval is the rule; several come from a strided split (a dimension that another mesh axis had split before).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace
from itertools import accumulate, product
from math import prod

Interval = tuple[int, int]
Layout = tuple[tuple[Interval, ...], ...]


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangular part of a tensor: where it begins and how long it is, in elements per dimension."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def volume(self) -> int:
        return prod(self.shape)

    def intersect(self, other: "Box") -> "Box | None":
        """What both cover; None when that is nothing."""
        begin = tuple(map(max, self.offset, other.offset))
        ends = (
            min(a + n, b + m) for a, n, b, m in zip(self.offset, self.shape, other.offset, other.shape, strict=True)
        )
        shape = tuple(end - start for start, end in zip(begin, ends, strict=True))
        return Box(begin, shape) if all(length > 0 for length in shape) else None

    def within(self, outer: "Box") -> tuple[slice, ...]:
        """Slices that cut this box out of a tensor that holds ``outer``."""
        return tuple(slice(a - b, a - b + n) for a, b, n in zip(self.offset, outer.offset, self.shape, strict=True))


@dataclass(frozen=True, slots=True)
class Split:
    """One mesh axis splits tensor dimension ``dim`` into ``count`` chunks; this rank has chunk ``index``.

    ``after`` is into how many pieces mesh axes further right had split the dimension before (1: none did).
    """

    dim: int
    count: int
    index: int
    after: int = 1


def whole(shape: Sequence[int]) -> Layout:
    """The layout of a rank that holds all of it."""
    return tuple(((0, size),) for size in shape)


def chunk(intervals: Sequence[Interval], count: int, index: int) -> tuple[Interval, ...]:
    """The ``index``-th of ``count`` chunks as torch cuts them: all but the last full ones have ceil(size / count)."""
    size = sum(stop - start for start, stop in intervals)
    length = -(-size // count)
    return _cut(intervals, min(index * length, size), min((index + 1) * length, size))


def layout_of(shape: Sequence[int], splits: Sequence[Split]) -> Layout:
    """What a rank holds after ``splits`` in the order in which they were done to the memory.

    ``splits`` come in mesh order, left to right. One with ``after > 1`` was done later than those to its right that
    split the same dimension, so each piece of those is cut into chunks.
    """
    dims: list[tuple[Interval, ...]] = list(whole(shape))
    for split in _in_order(splits):
        dims[split.dim] = chunk(dims[split.dim], split.count, split.index)
    return tuple(dims)


def layout_left_to_right(shape: Sequence[int], splits: Sequence[Split]) -> Layout:
    """The same, by the definition of a strided split: cut into ``after`` pieces, take this rank's chunk of each."""
    dims: list[tuple[Interval, ...]] = list(whole(shape))
    for split in splits:
        pieces = [chunk(dims[split.dim], split.after, number) for number in range(split.after)]
        taken = [interval for piece in pieces for interval in chunk(piece, split.count, split.index)]
        dims[split.dim] = _merge(taken)
    return tuple(dims)


def local_shape(layout: Layout) -> tuple[int, ...]:
    """The shape of the tensor that a rank with ``layout`` has in memory."""
    return tuple(sum(stop - start for start, stop in dim) for dim in layout)


def boxes(layout: Layout) -> list[tuple[Box, Box]]:
    """The parts a rank holds: each as a box of the full tensor, and where it lies in the rank's own memory."""
    if not prod(local_shape(layout)):
        return []
    found = []
    starts = [[0, *accumulate(stop - start for start, stop in dim)][:-1] for dim in layout]
    for choice in product(*(range(len(dim)) for dim in layout)):
        chosen = [dim[number] for dim, number in zip(layout, choice, strict=True)]
        shape = tuple(stop - start for start, stop in chosen)
        here = tuple(dim[number] for dim, number in zip(starts, choice, strict=True))
        found.append((Box(tuple(start for start, _ in chosen), shape), Box(here, shape)))
    return found


def overlap(every: Sequence[Box]) -> bool:
    """Whether any two of ``every`` have an element in common.

    Boxes are met in order along the dimension in which they begin at the most places, and compared with those that have
    not ended there; for the parts of a sharded tensor these are few.
    """
    if len(every) < 2 or not every[0].shape:
        return len(every) > 1
    dim = max(range(len(every[0].shape)), key=lambda d: len({box.offset[d] for box in every}))
    active: list[Box] = []
    for box in sorted(every, key=lambda box: box.offset[dim]):
        active = [other for other in active if other.offset[dim] + other.shape[dim] > box.offset[dim]]
        if any(other.intersect(box) is not None for other in active):
            return True
        active.append(box)
    return False


def is_run(part: Box, outer: Box) -> bool:
    """Whether ``part`` lies in one piece in the memory of a row-major tensor that holds ``outer``."""
    split = next((d for d, (n, m) in enumerate(zip(part.shape, outer.shape, strict=True)) if n != 1 and n != m), None)
    if split is None:
        partial = [d for d, (n, m) in enumerate(zip(part.shape, outer.shape, strict=True)) if n != m]
        split = partial[-1] if partial else 0
    leading_ones = all(n == 1 for n in part.shape[:split])
    trailing_full = all(n == m for n, m in zip(part.shape[split + 1 :], outer.shape[split + 1 :], strict=True))
    return leading_ones and trailing_full


def run_start(part: Box, outer: Box) -> int:
    """How many elements of a row-major tensor that holds ``outer`` precede the first one of ``part``."""
    position = 0
    for a, b, size in zip(part.offset, outer.offset, outer.shape, strict=True):
        position = position * size + (a - b)
    return position


def choose_writers(sizes: Mapping[str, tuple[int, tuple[int, ...]]]) -> dict[str, int]:
    """Which rank writes each tensor that several hold: the one that was given least so far, large ones first.

    ``sizes`` has the bytes of each and the ranks that hold the same. Ranks that hold the same tensors get the same
    answer without talking: loads are counted per set of ranks.
    """
    loads: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    writers: dict[str, int] = {}
    for key in sorted(sizes, key=lambda key: (-sizes[key][0], key)):
        size, ranks = sizes[key]
        if ranks not in loads:
            loads[ranks] = [(0, rank) for rank in ranks]
            heapify(loads[ranks])
        load, rank = loads[ranks][0]
        heapreplace(loads[ranks], (load + max(size, 1), rank))
        writers[key] = rank
    return writers


def _in_order(splits: Sequence[Split]) -> Iterable[Split]:
    waiting = list(splits)
    while waiting:
        ready = next((s for s in waiting if s.after == 1 or not _later(s, waiting)), waiting[0])
        waiting.remove(ready)
        yield ready


def _later(split: Split, waiting: Sequence[Split]) -> bool:
    position = next(i for i, other in enumerate(waiting) if other is split)
    return any(other.dim == split.dim for other in waiting[position + 1 :])


def _cut(intervals: Sequence[Interval], begin: int, end: int) -> tuple[Interval, ...]:
    taken, position = [], 0
    for start, stop in intervals:
        low, high = max(begin - position, 0), min(end - position, stop - start)
        if low < high:
            taken.append((start + low, start + high))
        position += stop - start
    return tuple(taken)


def _merge(intervals: Sequence[Interval]) -> tuple[Interval, ...]:
    merged: list[Interval] = []
    for start, stop in intervals:
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], stop)
        else:
            merged.append((start, stop))
    return tuple(merged)

"""Layout of shards: the box of a tensor on each rank, and the rank that writes it; pure arithmetic.

A rank's shard along one dim is a list of half-open intervals in the order of its memory. Usually there is one interval;
a strided split (of a dim that another mesh axis had split before) gives several.
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
    """Rectangular part of a tensor: offset and shape in elements per dim."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def volume(self) -> int:
        return prod(self.shape)

    def intersect(self, other: "Box") -> "Box | None":
        """Returns the intersection; None if it is empty."""
        begin = tuple(map(max, self.offset, other.offset))
        ends = (
            min(a + n, b + m) for a, n, b, m in zip(self.offset, self.shape, other.offset, other.shape, strict=True)
        )
        shape = tuple(end - start for start, end in zip(begin, ends, strict=True))
        return Box(begin, shape) if all(length > 0 for length in shape) else None

    def within(self, outer: "Box") -> tuple[slice, ...]:
        """Returns the slices that select this box from a tensor that holds ``outer``."""
        return tuple(slice(a - b, a - b + n) for a, b, n in zip(self.offset, outer.offset, self.shape, strict=True))


@dataclass(frozen=True, slots=True)
class Split:
    """A mesh axis splits tensor dim ``dim`` into ``count`` chunks, of which this rank has chunk ``index``.

    ``after`` is the number of chunks into which mesh axes further right had split the dim before (1: none did).
    """

    dim: int
    count: int
    index: int
    after: int = 1


def whole(shape: Sequence[int]) -> Layout:
    """Returns the layout of a rank that holds the full tensor."""
    return tuple(((0, size),) for size in shape)


def chunk(intervals: Sequence[Interval], count: int, index: int) -> tuple[Interval, ...]:
    """Returns chunk ``index`` of ``count`` as in ``torch.chunk``: full chunks have ceil(size / count) elements."""
    size = sum(stop - start for start, stop in intervals)
    length = -(-size // count)
    return _cut(intervals, min(index * length, size), min((index + 1) * length, size))


def layout_of(shape: Sequence[int], splits: Sequence[Split]) -> Layout:
    """Returns the shard of a rank after ``splits``, applied in the order in which they were applied to the memory.

    ``splits`` are in mesh order, left to right. A split with ``after > 1`` was applied later than the splits of the
    same dim to its right, so it splits each of their chunks.
    """
    dims: list[tuple[Interval, ...]] = list(whole(shape))
    for split in _in_order(splits):
        dims[split.dim] = chunk(dims[split.dim], split.count, split.index)
    return tuple(dims)


def layout_left_to_right(shape: Sequence[int], splits: Sequence[Split]) -> Layout:
    """Returns the same by the definition of a strided split: this rank's chunk of each of ``after`` chunks."""
    dims: list[tuple[Interval, ...]] = list(whole(shape))
    for split in splits:
        pieces = [chunk(dims[split.dim], split.after, number) for number in range(split.after)]
        taken = [interval for piece in pieces for interval in chunk(piece, split.count, split.index)]
        dims[split.dim] = _merge(taken)
    return tuple(dims)


def local_shape(layout: Layout) -> tuple[int, ...]:
    """Returns the shape of a rank's local tensor with ``layout``."""
    return tuple(sum(stop - start for start, stop in dim) for dim in layout)


def boxes(layout: Layout) -> list[tuple[Box, Box]]:
    """Returns the boxes of a rank's shard: each as a box of the full tensor, and as a box of the local tensor."""
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

    Sweeps along the dim with the most distinct offsets, and compares each box with those that have not ended there; for
    the shards of a tensor these are few.
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
    """Whether ``part`` is contiguous in the memory of a row-major tensor that holds ``outer``."""
    split = next((d for d, (n, m) in enumerate(zip(part.shape, outer.shape, strict=True)) if n != 1 and n != m), None)
    if split is None:
        partial = [d for d, (n, m) in enumerate(zip(part.shape, outer.shape, strict=True)) if n != m]
        split = partial[-1] if partial else 0
    leading_ones = all(n == 1 for n in part.shape[:split])
    trailing_full = all(n == m for n, m in zip(part.shape[split + 1 :], outer.shape[split + 1 :], strict=True))
    return leading_ones and trailing_full


def run_start(part: Box, outer: Box) -> int:
    """Returns the number of elements before the first one of ``part`` in a row-major tensor that holds ``outer``."""
    position = 0
    for a, b, size in zip(part.offset, outer.offset, outer.shape, strict=True):
        position = position * size + (a - b)
    return position


def choose_writers(sizes: Mapping[str, tuple[int, tuple[int, ...]]]) -> dict[str, int]:
    """Chooses the rank that writes each tensor with several replicas: the least loaded one, largest tensors first.

    ``sizes`` maps a tensor to its bytes and the ranks with equal replicas. Ranks with the same tensors choose the same
    writers without communication, because loads are counted per set of ranks.
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

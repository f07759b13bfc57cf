"""Prefetching of offloaded weights: the blocks that compute next are read while the present one computes.

A block is the weights of one module. ``acquire`` returns them, in memory of the execution device, and ``release`` ends
their use. A reader thread reads the segments of the blocks that ``BlockOrder`` predicts; a block whose prediction
was wrong is read by the caller, so that a wrong prediction costs time and never the result. Resident weights take at
most the budget, beside what the present block needs. The segment whose next use is farthest is dropped first: of a
model that does not fit, as much as fits stays resident from one forward to the next.
"""

import threading
import time
import weakref
from collections import deque
from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from accel_inference.prefetch.buffers import BufferPool, new_buffer
from accel_inference.prefetch.order import BlockOrder, next_uses
from accel_inference.prefetch.segments import Segment, SegmentState, WeightBlock, new_block
from accel_inference.weights.sources import Source

THREADS = (
    "another thread computes with this model now, whose weights are offloaded or cast: it has one place for each "
    "weight. Use a lock around its calls, or a copy.deepcopy of the model in each thread"
)
_LEAST_BUDGET = 256 * 2**20
_BLOCKS_IN_BUDGET = 4
_SHARE_IN_ADVANCE = 1 / 2
_QUEUE = 32
_NOW = -1
"""Distance of the present block; the one after it is at distance 0."""
_IDLE = 0.2
"""Seconds without work after which the reader thread ends; the next prefetch starts another."""


@dataclass(frozen=True, slots=True)
class PrefetchCounts:
    """Counts of a prefetcher since it was created.

    Attributes:
        acquired: blocks that were acquired.
        predicted: those of them that were predicted.
        bytes_read: bytes read from files or copied to the device, and how many of them in advance.
        waited_s: seconds for which callers waited for weights, their own reading included.
        resident_bytes: bytes of memory that weights and buffers take now, and the most that they took.
    """

    acquired: int = 0
    predicted: int = 0
    bytes_read: int = 0
    bytes_in_advance: int = 0
    waited_s: float = 0.0
    resident_bytes: int = 0
    peak_bytes: int = 0


class Prefetcher:
    """Offloaded weights of a model's blocks for one execution device; see the module.

    ``budget`` is the most bytes of resident weights, by default four of the largest blocks and at least 256 MiB. One
    thread at a time may hold blocks: the modules of a model have one place for each weight.
    """

    def __init__(self, device: torch.device, *, budget: int | None = None) -> None:
        self.device = device
        self._budget = budget
        self._blocks: list[WeightBlock] = []
        self._segments: dict[Hashable, Segment] = {}
        self._users: dict[int, list[int]] = {}
        """For each segment, by identity: the blocks that use it."""
        self._order = BlockOrder()
        self._queue: deque[Segment] = deque()
        self._pool = BufferPool()
        self._changed = threading.Condition()
        self._reader: threading.Thread | None = None
        self._end_of_reader: weakref.finalize[..., Prefetcher] | None = None
        self._absent = 0
        """Segments that are neither resident nor on their way."""
        self._ahead = 0
        """Bytes of the segments that were queued and not used since."""
        self._memory = 0
        """Bytes of the segments that are not absent."""
        self._held = 0
        self._holder: int | None = None
        self._counts = PrefetchCounts()

    @cached_property
    def _stream(self) -> torch.Stream | None:
        """Stream of all copies: torch's allocator keeps freed memory for the stream that it was allocated on."""
        if self.device.type == "cpu":
            return None
        stream: torch.Stream = torch.get_device_module(self.device).Stream(self.device)
        return stream

    @property
    def budget(self) -> int:
        """Bytes that resident weights may take, beside what the present block needs."""
        if self._budget is not None:
            return self._budget
        largest = max((sum(part.nbytes for part in block.segments) for block in self._blocks), default=0)
        return max(_LEAST_BUDGET, _BLOCKS_IN_BUDGET * largest)

    @property
    def counts(self) -> PrefetchCounts:
        """Measurement up to now."""
        with self._changed:
            return self._counts

    def add(self, sources: Mapping[str, Source]) -> int:
        """Adds a block with these weights and returns its number; blocks are added in the order of their modules."""
        with self._changed:
            block = new_block(sources, self._segments, self.device)
            self._absent += sum(id(segment) not in self._users for segment in block.segments)
            number = len(self._blocks)
            self._blocks.append(block)
            for segment in block.segments:
                self._users.setdefault(id(segment), []).append(number)
            self._order.expect(number)
            return number

    def acquire(self, number: int) -> dict[str, Tensor]:
        """The weights of a block, by name, until its release.

        Raises:
            RuntimeError: another thread holds blocks.
            CheckpointError: the weights cannot be read.
        """
        block = self._blocks[number]
        begin = time.perf_counter()
        with self._changed:
            self._check_thread()
            predicted = self._order.visit(number)
            if not predicted:
                self._cancel()
            if not block.names:
                self._enter(block, predicted)
                self._prefetch()
                return dict(block.direct)
            for segment in block.segments:
                segment.holders += 1
                self._used(segment)
            own = self._claim(block)
            self._enter(block, predicted)
            self._prefetch()
        try:
            self._complete(block, own)
            for segment in block.segments:
                segment.check()
        except BaseException:
            self.release(number)
            raise
        with self._changed:
            self._counts = replace(self._counts, waited_s=self._counts.waited_s + time.perf_counter() - begin)
        tensors = block.tensors()
        if self.device.type != "cpu":
            stream = torch.accelerator.current_stream(self.device)
            for tensor in tensors.values():
                tensor.record_stream(stream)
        return tensors

    def release(self, number: int) -> None:
        """Ends the use of a block's weights by its module; they stay resident while the budget permits."""
        with self._changed:
            for segment in self._blocks[number].segments:
                segment.holders -= 1
            self._held -= 1
            if not self._held:
                self._holder = None
            self._prefetch()

    def close(self) -> None:
        """Drops all resident weights; the reader thread ends after what it reads now."""
        with self._changed:
            self._cancel()
            while any(segment.state is SegmentState.READING for segment in self._segments.values()):
                self._changed.wait()
            for segment in self._segments.values():
                if not segment.holders:
                    self._drop(segment)
            self._pool.drop()
            self._changed.notify_all()

    def _check_thread(self) -> None:
        here = threading.get_ident()
        if self._holder not in (None, here):
            raise RuntimeError(THREADS)
        self._holder = here

    def _enter(self, block: WeightBlock, predicted: bool) -> None:
        self._held += 1
        counts = self._counts
        self._counts = replace(counts, acquired=counts.acquired + 1, predicted=counts.predicted + predicted)

    def _claim(self, block: WeightBlock) -> list[Segment]:
        """Marks the block's segments that nobody reads yet as read by this thread, with buffers whatever the budget."""
        own = []
        for segment in block.segments:
            if segment.state is SegmentState.QUEUED:
                self._queue.remove(segment)
            elif segment.state is SegmentState.ABSENT:
                self._reserve(segment, at_distance=_NOW, force=True)
            else:
                continue
            segment.state = SegmentState.READING
            own.append(segment)
        return own

    def _complete(self, block: WeightBlock, own: list[Segment]) -> None:
        """Reads the claimed segments, and waits for those that the reader thread reads."""
        for segment in own:
            self._read(segment)
        with self._changed:
            for segment in block.segments:
                while segment.state is SegmentState.READING:
                    self._changed.wait()
            again = self._claim(block)  # what the reader thread failed to read: the error is the caller's
        for segment in again:
            self._read(segment)

    def _read(self, segment: Segment, *, in_advance: bool = False) -> None:
        with self._leaving_reading(segment):
            segment.read(self._stream)
            size = sum(weight.nbytes for weight in (*segment.weights.values(), *segment.mapped.values()))
            with self._changed:
                counts = self._counts
                self._counts = replace(
                    counts,
                    bytes_read=counts.bytes_read + size,
                    bytes_in_advance=counts.bytes_in_advance + size * in_advance,
                )

    @contextmanager
    def _leaving_reading(self, segment: Segment) -> Iterator[None]:
        """The segment is resident at the end, or absent after an error, and waiting threads are told."""
        try:
            yield
        except BaseException:
            with self._changed:
                self._drop(segment)
                self._changed.notify_all()
            raise
        with self._changed:
            segment.state = SegmentState.RESIDENT
            self._changed.notify_all()

    def _prefetch(self) -> None:
        """Queues the segments of the predicted blocks that have room, next ones first."""
        if not self._absent:
            self._wake_reader()
            return
        for distance, number in enumerate(self._order.upcoming()):
            for segment in self._blocks[number].segments:
                if segment.state is not SegmentState.ABSENT:
                    continue
                if not self._may_queue(segment) or not self._reserve(segment, at_distance=distance):
                    self._wake_reader()
                    return
                segment.state, segment.in_advance = SegmentState.QUEUED, True
                self._ahead += segment.nbytes
                self._queue.append(segment)
        self._wake_reader()

    def _may_queue(self, segment: Segment) -> bool:
        """Whether what is read in advance stays below its share of the budget; the rest is for what stays resident."""
        if len(self._queue) >= _QUEUE:
            return False
        return not self._ahead or self._ahead + segment.nbytes <= self.budget * _SHARE_IN_ADVANCE

    def _used(self, segment: Segment) -> None:
        """Counts a segment no more among those that are read in advance."""
        if segment.in_advance:
            segment.in_advance = False
            self._ahead -= segment.nbytes

    def _cancel(self) -> None:
        """Gives up what was queued by a prediction that was wrong."""
        while self._queue:
            self._drop(self._queue[-1])

    def _reserve(self, segment: Segment, *, at_distance: int, force: bool = False) -> bool:
        """Gives the segment a buffer if the budget has room, or gets room from segments with a later next use."""
        while not self._has_room(segment):
            if victim := self._victim(at_distance):
                self._drop(victim)
            elif self._pool.nbytes:
                self._pool.drop()
            elif force:
                break
            else:
                return False
        if segment.buffer_bytes:
            segment.buffer = self._pool.take(segment.buffer_bytes) or new_buffer(segment.buffer_bytes, self.device)
        self._memory += segment.nbytes
        self._absent -= 1
        resident = self._resident()
        self._counts = replace(self._counts, resident_bytes=resident, peak_bytes=max(self._counts.peak_bytes, resident))
        return True

    def _has_room(self, segment: Segment) -> bool:
        """Whether the segment takes no more memory than its buffer in the pool has, or the budget has room for it."""
        added = segment.nbytes - (segment.buffer_bytes if self._pool.has(segment.buffer_bytes) else 0)
        return added <= 0 or self._resident() + added <= self.budget

    def _resident(self) -> int:
        return self._pool.nbytes + self._memory

    def _victim(self, at_distance: int) -> Segment | None:
        """The segment to drop for one that is used after so many blocks: unused now, and used again after that."""
        uses = next_uses(list(self._order.upcoming()))
        never = len(self._blocks) + len(uses)

        def next_use(segment: Segment) -> int:
            return min((uses.get(number, never) for number in self._users[id(segment)]), default=never)

        candidates = [
            segment
            for segment in self._segments.values()
            if not segment.holders and segment.state in (SegmentState.RESIDENT, SegmentState.QUEUED)
        ]
        farthest = max(candidates, key=next_use, default=None)
        return farthest if farthest is not None and next_use(farthest) > at_distance else None

    def _drop(self, segment: Segment) -> None:
        if segment.state is SegmentState.ABSENT:
            return
        if segment.state is SegmentState.QUEUED:
            self._queue.remove(segment)
        self._used(segment)
        segment.state, segment.tensors = SegmentState.ABSENT, {}
        self._memory -= segment.nbytes
        self._absent += 1
        if segment.buffer is not None:
            buffer, segment.buffer = segment.buffer, None
            self._pool.give(buffer)

    def _wake_reader(self) -> None:
        if not self._queue:
            return
        if self._reader is None or not self._reader.is_alive():
            self._start_reader()
        self._changed.notify_all()

    def _start_reader(self) -> None:
        """Starts the reader thread, which ends with the prefetcher, and before the interpreter does."""
        if self._end_of_reader is not None:
            self._end_of_reader.detach()
        ending = threading.Event()
        self._reader = threading.Thread(
            target=_read_in_background, args=(weakref.ref(self), ending), name="accel weight reader", daemon=True
        )
        self._end_of_reader = weakref.finalize(self, _end_reader, self._reader, ending, self._changed)
        self._reader.start()

    def _next_job(self, ending: threading.Event) -> Segment | None:
        """The next segment to read, marked so; None at the end or after a while without one, when the thread ends."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._queue) or ending.is_set(), timeout=_IDLE)
            if ending.is_set() or not self._queue:
                self._reader = None
                return None
            segment = self._queue.popleft()
            segment.state = SegmentState.READING
            return segment


def _end_reader(reader: threading.Thread, ending: threading.Event, changed: threading.Condition) -> None:
    """Ends the reader thread after what it reads; one that left torch during finalization would abort the process."""
    if reader is not threading.current_thread():
        with changed:
            ending.set()
            changed.notify_all()
        reader.join()


def _read_in_background(prefetcher: "weakref.ref[Prefetcher]", ending: threading.Event) -> None:
    """The reader thread; it holds its prefetcher only while it works or waits for work."""
    while (found := prefetcher()) is not None and (segment := found._next_job(ending)) is not None:
        # The caller who needs a segment that could not be read reads it again, and gets the error.
        with suppress(Exception):
            found._read(segment, in_advance=True)
        del found, segment

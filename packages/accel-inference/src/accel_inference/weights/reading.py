"""Weights read one after the other, several at a time."""

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from accel_inference.weights.sources import FileWeight, Weight
from accel_state.device.huge_pages import new_tensor
from accel_state.environment import available_cpus

_MOST_THREADS = 4
_SMALL = 2**20
"""Bytes below which handing a read to another thread costs more than the read."""


def read_in_order(sources: Iterable[Weight], *, threads: int | None = None) -> Iterator[Tensor]:
    """Yields the weights in their order, and reads the next ones while the caller uses one.

    Host memory holds at most one weight for each thread beside what the caller keeps, so that a model larger than it
    can go to a device. The caller reads what is small, in host memory, or of a format with threads of its own, and
    gets it at once unless it waits for a read before it.
    """
    count = threads or _threads()
    if count == 1:
        yield from (source.read() for source in sources)
        return
    reads: deque[Weight | Future[Tensor]] = deque()
    with ThreadPoolExecutor(count, "accel weights") as team:
        try:
            running = 0
            for source in sources:
                large = isinstance(source, FileWeight) and source.nbytes >= _SMALL
                reads.append(team.submit(source.read) if large else source)
                running += large
                while reads and (running > count or not isinstance(reads[0], Future)):
                    done = reads.popleft()
                    running -= isinstance(done, Future)
                    yield _result(done)
            while reads:
                yield _result(reads.popleft())
        finally:
            for read in reads:
                if isinstance(read, Future):
                    read.cancel()


def read_in_turn(sources: Iterable[Weight]) -> Iterator[Tensor]:
    """Yields weights in their order, each of which the caller needs only until it takes the next one.

    Weights of files share two buffers of the largest one's size: one is read while the caller uses the other. With new
    memory for each, glibc would keep what is freed between the tensors that the caller makes, which was 1.7 times a
    model of 16 MiB weights.
    """
    listed = list(sources)
    largest = max((source.nbytes for source in listed if isinstance(source, FileWeight)), default=0)
    buffers = [new_tensor((largest,), torch.uint8) for _ in listed[:2]]

    def begin(position: int) -> Weight | Future[Tensor]:
        source = listed[position]
        if isinstance(source, FileWeight):
            return team.submit(source.read, buffers[position % 2])
        return source

    with ThreadPoolExecutor(1, "accel weights") as team:
        following = begin(0) if listed else None
        for position in range(len(listed)):
            current = following
            assert current is not None
            following = begin(position + 1) if position + 1 < len(listed) else None
            yield _result(current)


def _result(read: "Weight | Future[Tensor]") -> Tensor:
    return read.result() if isinstance(read, Future) else read.read()


def _threads() -> int:
    return min(_MOST_THREADS, available_cpus())

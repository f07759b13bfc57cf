"""Weights read one after the other, several at a time."""

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

from torch import Tensor

from accel_inference.weights.sources import FileWeight, Weight
from accel_state.environment import usable_cpus

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


def _result(read: "Weight | Future[Tensor]") -> Tensor:
    return read.result() if isinstance(read, Future) else read.read()


def _threads() -> int:
    return max(1, min(_MOST_THREADS, len(usable_cpus())))

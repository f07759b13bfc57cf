"""Many small jobs on a few threads."""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import nullcontext
from dataclasses import dataclass
from socket import gethostname
from typing import final

from accel_state.environment import available_cpus, usable_cpus

_Job = Callable[[], None]


@final
@dataclass(frozen=True, slots=True)
class Seat:
    """Machine of a process, and the CPUs that the process may use there, as a bit mask."""

    host: str
    processors: int

    @classmethod
    def own(cls) -> "Seat":
        """Returns the machine and CPUs of this process."""
        return cls(gethostname(), sum(1 << number for number in usable_cpus()))

    def threads(self, every: Sequence["Seat"], most: int) -> int:
        """Returns the number of threads, 1 to ``most``, that uses this process's share of its CPUs.

        ``every`` has the seats of all processes that work at the same time, including this one. Each CPU is shared
        equally between the processes that may use it. More threads would only wait for each other.
        """
        here = [seat.processors for seat in every if seat.host == self.host]
        share = sum(
            1 / sum(processors >> number & 1 for processors in here)
            for number in range(self.processors.bit_length())
            if self.processors >> number & 1
        )
        return max(1, min(most, int(share + 1e-6)))


def default_threads() -> int:
    """Returns a number of threads that keeps a disk busy, at most the number of usable CPUs."""
    return min(4, available_cpus())


def run_jobs(jobs: Iterable[_Job], threads: int | None = None, *, pool: ThreadPoolExecutor | None = None) -> None:
    """Runs ``jobs`` on several threads; a failure stops further jobs and is raised once all running ones have ended.

    The calling thread is one of them, so that it does not wait for others to start; the others come from ``pool`` or
    are started here. Each thread has a run of neighbouring jobs, so that its reads are sequential and the kernel reads
    ahead; then it takes over jobs of other threads.
    """
    waiting = list(jobs)
    count = max(1, min(default_threads() if threads is None else threads, len(waiting)))
    runs = [deque(waiting[len(waiting) * one // count : len(waiting) * (one + 1) // count]) for one in range(count)]

    def work(own: int) -> None:
        while (job := _taken(runs[own], runs)) is not None:
            try:
                job()
            except BaseException:
                for run in runs:
                    run.clear()
                raise

    if count == 1:
        work(0)
        return
    with nullcontext(pool) if pool is not None else ThreadPoolExecutor(count - 1, "accel-ckpt") as team:
        helping = [team.submit(work, one) for one in range(1, count)]
        try:
            work(0)
        finally:
            wait([helper for helper in helping if not helper.cancel()])
    for helper in helping:
        if not helper.cancelled():
            helper.result()


def _taken(own: "deque[_Job]", runs: "list[deque[_Job]]") -> _Job | None:
    """Takes the first remaining job of this thread, otherwise the last remaining job of another one; thread-safe."""
    try:
        return own.popleft()
    except IndexError:
        pass
    for run in runs:
        try:
            return run.pop()
        except IndexError:
            continue
    return None

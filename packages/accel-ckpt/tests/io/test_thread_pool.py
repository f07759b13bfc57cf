"""Jobs on threads: each once, neighbours by one thread, nothing left running behind a failure."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accel_ckpt.io.thread_pool import Seat, default_threads, run_jobs


@settings(deadline=None)
@given(count=st.integers(0, 40), threads=st.integers(1, 5), pooled=st.booleans())
def test_every_job_runs_once(count: int, threads: int, pooled: bool) -> None:
    done: list[int] = []
    jobs = [partial(done.append, number) for number in range(count)]
    if pooled:
        with ThreadPoolExecutor(2) as pool:
            run_jobs(jobs, threads, pool=pool)
    else:
        run_jobs(iter(jobs), threads)
    assert sorted(done) == list(range(count))


def test_a_thread_takes_neighbours_and_then_what_others_have_left() -> None:
    """Thread 0 may only go on once the other has begun, which may only go on once thread 0 has taken over from it."""
    order: dict[int, list[int]] = {}
    begun, taken = threading.Event(), threading.Event()

    def job(number: int) -> None:
        order.setdefault(threading.get_ident(), []).append(number)
        if number == 0:
            assert begun.wait(30)
        if number == 4:
            begun.set()
            assert taken.wait(30)
        if number == 7:
            taken.set()

    run_jobs([partial(job, number) for number in range(8)], threads=2)
    assert order[threading.get_ident()][:5] == [0, 1, 2, 3, 7]
    assert next(numbers for thread, numbers in order.items() if thread != threading.get_ident())[0] == 4


def test_helpers_that_never_start_are_not_waited_for() -> None:
    go, done = threading.Event(), []
    with ThreadPoolExecutor(1) as pool:
        pool.submit(go.wait, 30)
        run_jobs([partial(done.append, number) for number in range(6)], threads=3, pool=pool)
        assert sorted(done) == list(range(6))
        go.set()


@pytest.mark.parametrize("failing", [0, 500], ids=["this thread", "a helper"])
def test_a_failure_ends_the_rest_and_is_raised(failing: int) -> None:
    """Job 500 is the first of the second thread, which begins while job 0 waits for it."""
    other = threading.Event()
    done: list[int] = []

    def job(number: int) -> None:
        if number == 500:
            other.set()
        if number == 0:
            assert other.wait(30)
        if number == failing:
            raise OSError(f"job {number}")
        time.sleep(0.01)
        done.append(number)

    with pytest.raises(OSError, match=f"job {failing}"):
        run_jobs([partial(job, number) for number in range(1000)], threads=2)
    assert len(done) < 999


def test_there_is_always_a_thread() -> None:
    assert 1 <= default_threads() <= 4


ALL, LOW, HIGH = 0xFF, 0x0F, 0xF0


@pytest.mark.parametrize(
    ("others", "most", "threads"),
    [
        ([], 4, 4),
        ([], 16, 8),
        ([Seat("a", ALL)], 16, 4),
        ([Seat("a", ALL)] * 15, 16, 1),  # never none
        ([Seat("b", ALL)] * 15, 16, 8),  # another machine's
        ([Seat("a", HIGH)], 16, 6),  # four alone, four shared by two
        ([Seat("a", LOW), Seat("a", HIGH)], 16, 4),
    ],
)
def test_processes_share_the_processors_that_each_may_use(others: list[Seat], most: int, threads: int) -> None:
    own = Seat("a", ALL)
    assert own.threads([own, *others], most) == threads


def test_a_process_bound_to_its_own_processors_shares_them_with_nobody() -> None:
    seats = [Seat("a", LOW), Seat("a", HIGH)]
    assert [seat.threads(seats, 16) for seat in seats] == [4, 4]


def test_this_process_has_as_many_threads_as_before_where_it_is_alone() -> None:
    assert Seat.own().threads([Seat.own()], default_threads()) == default_threads()

"""Tests that fail on purpose; ``test_broken_ranks.py`` runs this file in a pytest of its own and reads its report."""

import os
import signal
import subprocess
import sys
import threading
import time
import unittest

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st


class OwnError(ValueError):
    def __init__(self, code: int) -> None:
        super().__init__(f"code {code}")
        self.code = code

    def __reduce__(self) -> tuple[type, tuple[int]]:
        return OwnError, (self.code,)


@pytest.mark.ranks(2)
def test_assert_shows_values(rank: int) -> None:
    print(f"printed by {rank}")
    found = {"loss": 1.5, "rank": rank}
    assert found == {"loss": 1.5, "rank": 0}


@pytest.mark.ranks(2)
def test_exception_wakes_who_waits(rank: int) -> None:
    if rank == 1:
        raise OwnError(41)
    dist.barrier()


# Time enough for ranks that have this module already, as those of the test before.
@pytest.mark.ranks(2, timeout=2.0)
def test_hang(rank: int) -> None:
    if rank == 1:
        time.sleep(60)  # the line that hangs
    dist.all_reduce(torch.ones(2))


@pytest.mark.ranks(2)
def test_ranks_live_again(rank: int) -> None:
    dist.barrier()


@pytest.mark.ranks(2, timeout=2.0)
def test_stopped(rank: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    dist.barrier()


@pytest.mark.ranks(2)
def test_killed(rank: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


@pytest.mark.ranks(2)
def test_exits(rank: int) -> None:
    if rank == 0:
        print("last words")
        os._exit(17)


@pytest.mark.ranks(2)
def test_skips(rank: int) -> None:
    pytest.skip("not on a Sunday")


@pytest.mark.ranks(2)
def test_skips_on_one_rank(rank: int) -> None:
    if rank == 0:
        pytest.skip("only me")


@pytest.mark.ranks(2)
def test_xfails(rank: int) -> None:
    if rank == 0:
        pytest.xfail("known")
    dist.barrier()


@pytest.mark.ranks(2)
@pytest.mark.xfail(raises=OwnError, strict=True)
def test_xfail_by_type(rank: int) -> None:
    raise OwnError(1)


@pytest.mark.ranks(2)
@pytest.mark.leaks("environment")
def test_leaves_variable(rank: int) -> None:
    if rank == 1:
        os.environ["LEFT_BY_TEST"] = "here"


@pytest.mark.ranks(2, group=False)
@pytest.mark.leaks
def test_leaves_group(rank: int) -> None:
    dist.init_process_group("gloo")


@pytest.mark.ranks(2)
@pytest.mark.leaks("threads", "children")
def test_leaves_thread_and_child(rank: int) -> None:
    if rank == 0:
        threading.Thread(target=time.sleep, args=(30,), name="sleeper", daemon=True).start()
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(30)"])


@pytest.mark.leaks("environment")
def test_leaves_variable_in_this_process() -> None:
    os.environ["LEFT_HERE"] = "here"


@pytest.mark.ranks(2)
def test_fixture_that_cannot_travel(rank: int, capsys: pytest.CaptureFixture[str]) -> None:
    raise AssertionError("never reached")


@pytest.mark.ranks(0)
def test_zero_ranks(rank: int) -> None:
    raise AssertionError("never reached")


@pytest.mark.ranks(2)
@settings(derandomize=False)  # as by default, except where the variable CI is set
@given(st.integers())
def test_random_examples(value: int) -> None:
    raise AssertionError("never reached")


@pytest.mark.ranks(2)
async def test_coroutine(rank: int) -> None:
    raise AssertionError("never reached")


class TestUnit(unittest.TestCase):
    @pytest.mark.ranks(2)
    def test_unittest(self) -> None:
        raise AssertionError("never reached")


@pytest.mark.tpu
def test_needs_tpu() -> None:
    raise AssertionError("never reached")


@pytest.mark.multigpu(64)
def test_needs_64() -> None:
    raise AssertionError("never reached")


@pytest.mark.ranks(2)
@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_warning_filters_reach_ranks(rank: int) -> None:
    import warnings

    with pytest.raises(RuntimeWarning):
        warnings.warn("now an error", RuntimeWarning, stacklevel=1)

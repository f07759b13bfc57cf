"""A pool gives back results by rank, carries exceptions, outlives hung and dead ranks, and leaves no process behind."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from accel_state import Session
from accel_testing.errors import LeakError, RankDied, RankError, RankHung
from accel_testing.faults.faults import many_open_files
from accel_testing.ranks import hash_seeds
from accel_testing.ranks.pool import RankPool


@pytest.fixture
def pool(rank_pool: RankPool) -> RankPool:
    return rank_pool


class Refused(Exception):
    """Takes no message, so its pickle cannot be rebuilt."""

    def __init__(self, a: int, *, b: int) -> None:
        super().__init__(f"{a} and {b}")


def test_results_come_by_rank(pool: RankPool) -> None:
    offset = 10
    assert pool.run(lambda factor: dist.get_rank() * factor + offset, 2) == [10, 12]


def test_function_of_a_test_module_is_found(pool: RankPool) -> None:
    assert pool.run(_reduce, scale=3.0) == [[9.0], [9.0]]


def _reduce(scale: float) -> list[float]:
    value = torch.tensor([scale * (dist.get_rank() + 1)])
    dist.all_reduce(value)
    return value.tolist()


@pytest.mark.slow
def test_ranks_start_in_a_process_with_more_than_a_thousand_files() -> None:
    with many_open_files(), RankPool(2) as pool:
        assert pool.run(dist.get_rank) == [0, 1]


def test_each_call_has_a_new_group(pool: RankPool) -> None:
    assert pool.run(dist.get_world_size) == [2, 2]
    assert pool.run(dist.get_world_size, ranks=3) == [3, 3, 3]
    assert pool.run(dist.get_world_size, ranks=1) == [1]


def test_ranks_are_reused(pool: RankPool) -> None:
    assert pool.run(os.getpid) == pool.run(os.getpid) == list(pool.pids[:2])


def test_process_is_as_before_after_each_call(pool: RankPool, tmp_path: Path) -> None:
    def disturb() -> None:
        os.environ["LEFT"] = "1"
        os.chdir(tmp_path)
        torch.set_default_dtype(torch.float64)
        torch.set_grad_enabled(False)
        torch.manual_seed(7)
        torch.nn.functional.linear = torch.nn.functional.bilinear

    def look() -> tuple[object, ...]:
        modes = torch.ones(1).dtype, torch.is_grad_enabled(), torch.initial_seed()
        return os.environ.get("LEFT"), os.getcwd(), modes, torch.nn.functional.linear.__name__

    before = pool.run(look)
    pool.run(disturb)
    assert pool.run(look) == before


def test_each_rank_has_a_hash_seed_of_its_own(pool: RankPool) -> None:
    first, second = pool.run(lambda: hash("parameter"))
    assert first != second
    assert pool.run(lambda: os.environ.get("PYTHONHASHSEED")) == [None, None]


@pytest.mark.slow
def test_hash_seeds_of_a_run_can_be_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(hash_seeds.VARIABLE, "11")
    seen = []
    for _ in range(2):
        with RankPool(2) as pool:
            seen.append(pool.run(lambda: hash("parameter")))
    assert seen[0] == seen[1]
    assert seen[0][0] != seen[0][1]


def test_ranks_meet_as_those_of_a_script_do(pool: RankPool) -> None:
    def look() -> tuple[bool, bool]:
        session = Session.current()
        assert session is not None
        assert session.lease is not None
        return session.owns_group, session.lease.watchdog is not None

    assert pool.run(look) == [(True, True)] * 2


def test_ranks_use_one_thread_and_the_loopback(pool: RankPool) -> None:
    assert pool.run(torch.get_num_threads, group=None) == [1, 1]
    assert pool.run(lambda: os.environ["GLOO_SOCKET_IFNAME"])[0] in ("lo", "lo0")


def test_launcher_variables_do_not_reach_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_PROCID", "5")
    monkeypatch.setenv("MASTER_ADDR", "elsewhere")
    with RankPool(1) as pool:
        (seen,) = pool.run(lambda: [os.environ.get(name) for name in ("SLURM_PROCID", "MASTER_ADDR", "RANK")])
    assert seen == [None, "127.0.0.1", "0"]


def test_exception_keeps_type_and_traceback(pool: RankPool) -> None:
    def fail() -> None:
        if dist.get_rank() == 1:
            raise KeyError("missing")

    with pytest.raises(KeyError, match="missing") as caught:
        pool.run(fail)
    assert caught.value.__notes__ == ["raised on rank 1"]
    assert isinstance(caught.value.__cause__, RankError)
    assert "in fail" in str(caught.value.__cause__)


def test_first_failure_is_raised_not_its_consequence(pool: RankPool) -> None:
    def fail() -> None:
        if dist.get_rank() == 1:
            time.sleep(0.05)
            raise ZeroDivisionError
        dist.barrier()

    with pytest.raises(ZeroDivisionError):
        pool.run(fail)


def test_exception_that_cannot_be_rebuilt_becomes_a_rank_error(pool: RankPool) -> None:
    def fail() -> None:
        raise Refused(1, b=2)

    with pytest.raises(RankError, match=r"rank \d raised Refused: 1 and 2"):
        pool.run(fail)


def test_result_that_cannot_travel_is_the_ranks_failure(pool: RankPool) -> None:
    with pytest.raises(Exception, match="pickle"):
        pool.run(lambda: (item for item in ()))


def test_hang_names_the_rank_and_the_pool_goes_on(pool: RankPool, tmp_path: Path) -> None:
    def hang() -> None:
        if dist.get_rank() == 1:
            (tmp_path / "inside").touch()
            time.sleep(120)

    for seconds in (0.3, 3.0, 30.0):  # which is the first that this machine needs to come there
        before = pool.run(os.getpid)
        with pytest.raises(RankHung) as caught:
            pool.run(hang, timeout=seconds)
        if (tmp_path / "inside").exists():
            break
    assert re.search(r"rank 1 did not answer in \d+ s; it stands at .*test_pool.py:\d+ in hang", str(caught.value))
    after = pool.run(os.getpid)
    assert not set(before) & set(after)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        (lambda: os._exit(3), "rank 0 ended with exit status 3"),
        (lambda: os.kill(os.getpid(), signal.SIGSEGV), r"rank 0 was killed by SIGSEGV \(11\)"),
    ],
    ids=["exit", "signal"],
)
def test_dead_rank_is_named(pool: RankPool, how: object, words: str) -> None:
    with pytest.raises(RankDied, match=words):
        pool.run(how, ranks=1)  # type: ignore[arg-type]


def test_rank_that_dies_after_its_work_is_named(pool: RankPool) -> None:
    def die_later() -> None:
        destroy = dist.destroy_process_group
        dist.destroy_process_group = lambda *group: os._exit(9) if dist.get_rank() == 1 else destroy(*group)

    with pytest.raises(RankDied, match="rank 1 ended with exit status 9 while it left its process group"):
        pool.run(die_later)


def test_rank_that_died_between_calls_is_replaced(pool: RankPool) -> None:
    pid = pool.run(os.getpid)[1]
    os.kill(pid, signal.SIGKILL)
    assert wait_until(lambda: not is_running(pid))
    assert pool.run(dist.get_rank) == [0, 1]


def test_leak_is_named(pool: RankPool) -> None:
    with pytest.raises(LeakError, match=r"on rank 0: environment variable OF_RANK is '0'"):
        pool.run(lambda: os.environ.__setitem__("OF_RANK", str(dist.get_rank())), checks=["environment"])


def test_children_of_a_killed_rank_end_with_it(pool: RankPool) -> None:
    def start() -> int:
        return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(120)"]).pid

    (child,) = pool.run(start, ranks=1)
    assert is_running(child)
    with pytest.raises(RankHung):
        pool.run(time.sleep, 120, ranks=1, timeout=0.1)
    assert wait_until(lambda: not is_running(child))


def test_folder_is_removed_on_close(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    pool = RankPool(1)
    pool.run(os.getpid)
    assert list(tmp_path.iterdir())
    pool.close()
    assert not list(tmp_path.iterdir())


def test_no_ranks_are_refused() -> None:
    with pytest.raises(ValueError, match="a pool of 0 ranks"):
        RankPool(0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kill", "options", "processes"),
    [
        pytest.param(signal.SIGKILL, [], 4, id="SIGKILL"),
        pytest.param(signal.SIGTERM, [], 4, id="SIGTERM"),
        pytest.param(signal.SIGINT, [], 4, id="SIGINT"),
        pytest.param(signal.SIGKILL, ["--launcher=accel"], 3, id="SIGKILL-accel"),
        pytest.param(signal.SIGTERM, ["--launcher=torchrun"], 3, id="SIGTERM-torchrun"),
    ],
)
def test_no_process_outlives_an_interrupted_pytest(
    tmp_path: Path, kill: signal.Signals, options: list[str], processes: int
) -> None:
    """Whatever ends pytest, its ranks and their servers, or their launcher, end within moments.

    A process that the test forked, and that lives on, does not keep them.
    """
    test = tmp_path / "test_waits.py"
    test.write_text(
        "import os, pathlib, time, pytest\n"
        "@pytest.fixture\n"
        "def forked(rank_pool):\n"
        "    rank_pool.run(os.getpid)\n"
        "    if (pid := os.fork()) == 0:\n"
        "        time.sleep(600)\n"
        "        os._exit(0)\n"
        f"    pathlib.Path({str(tmp_path)!r}, 'forked').write_text(str(pid))\n"
        "@pytest.mark.ranks(2)\n"
        "def test_waits(rank, forked):\n"
        f"    pathlib.Path({str(tmp_path)!r}, f'pid-{{rank}}').write_text(f'{{os.getpid()}} {{os.getppid()}}')\n"
        "    time.sleep(600)\n"
    )
    folder = tmp_path / "folder"
    folder.mkdir()
    command = [sys.executable, "-m", "pytest", str(test), "-p", "no:cacheprovider", "-c", os.devnull, *options]
    with subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.DEVNULL, env={**os.environ, "TMPDIR": str(folder)}
    ) as running:
        assert wait_until(lambda: len(pids_in(tmp_path)) == processes)
        running.send_signal(kill)
        running.wait(60)
    pids = pids_in(tmp_path)
    forked = int((tmp_path / "forked").read_text())
    try:
        assert len(pids) == processes
        assert wait_until(lambda: not any(map(is_running, pids)))
        assert wait_until(lambda: not list(folder.glob("accel-ranks-*")))
        assert is_running(forked)
    finally:
        os.kill(forked, signal.SIGKILL)


def pids_in(folder: Path) -> set[int]:
    """What ranks have written down: their own numbers, and those of the servers or the launcher that started them."""
    return {int(pid) for path in folder.glob("pid-*") for pid in path.read_text().split()}


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(condition: object, seconds: float = 90.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():  # type: ignore[operator]
            return True
        time.sleep(0.05)
    return False


def test_a_rank_counts_devices_without_a_driver_that_no_fork_survives() -> None:
    from accel_testing.ranks.environment import rank_environment

    assert rank_environment({})["PYTORCH_NVML_BASED_CUDA_CHECK"] == "1"
    assert rank_environment({"CUDA_MODULE_LOADING": "EAGER"})["CUDA_MODULE_LOADING"] == "EAGER"

"""Writers that die, at every call to the system and at any time, disks that are full, and two runs in one folder."""

import ctypes
import os
import random
import resource
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import accel_ckpt
from accel_ckpt import CheckpointDirectory, keep_last
from accel_state.errors import CheckpointError

SYSTEM_CALLS = ("open", "close", "mkdir", "rmdir", "pwritev", "fsync", "rename", "unlink", "preadv")


def state(number: int, size: int = 3000) -> dict[str, Any]:
    return {"model": {f"w{i}": torch.full((size,), number * 10 + i) for i in range(3)}, "n": number}


def check(saved: accel_ckpt.Checkpoint) -> int:
    number: int = saved.read("n")
    for key, value in saved.read("model").items():
        assert torch.equal(value, torch.full_like(value, number * 10 + int(key[1:])))
    return number


def in_child(work: Callable[[], object]) -> int:
    """Runs ``work`` in a fork of this process; its exit status, negative if a signal ended it."""
    child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        except BaseException as error:
            os.write(2, f"{type(error).__name__}: {error}\n".encode())
            os._exit(9)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def die_at(call: int) -> None:
    """Makes this process end by SIGKILL instead of its ``call``-th call to the system."""
    left = [call]

    def count(function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)

        return counted

    for name in SYSTEM_CALLS:
        setattr(os, name, count(getattr(os, name)))
    from accel_ckpt import staging

    staging._exchange = count(staging._exchange)  # type: ignore[assignment]


def survive(folder: Path, kill: Callable[[Callable[[], object]], int], *, overwrite: bool, number: int) -> int:
    """Saves ``number`` in a child that ``kill`` ends; afterwards there is a whole checkpoint, and no leftover."""
    series = CheckpointDirectory(folder, retention=keep_last(2))

    def work() -> None:
        if overwrite:
            accel_ckpt.save(folder / "checkpoint_0", state(number))
        else:
            series.save(state(number))

    status = kill(lambda: in_child(work))
    series.sweep()
    latest = series.latest()
    assert latest is not None, "no whole checkpoint is left"
    assert check(latest) in (number - 1, number)
    if status == 0:
        assert check(latest) == number
    assert not [name for name in os.listdir(folder) if name.startswith(".")]
    return status


@pytest.mark.parametrize("overwrite", [False, True], ids=["series", "overwriting"])
@pytest.mark.parametrize("stretch", range(4))
def test_a_writer_killed_at_any_call_leaves_a_whole_checkpoint(tmp_path: Path, stretch: int, overwrite: bool) -> None:
    CheckpointDirectory(tmp_path).save(state(0))
    CheckpointDirectory(tmp_path).save(state(1)) if not overwrite else accel_ckpt.save(
        tmp_path / "checkpoint_0", state(1)
    )
    for call in range(1 + stretch, 200, 4):

        def kill(run: Callable[[], int], call: int = call) -> int:
            child = os.fork()
            if child == 0:
                die_at(call)
                series = CheckpointDirectory(tmp_path, retention=keep_last(2))
                if overwrite:
                    accel_ckpt.save(tmp_path / "checkpoint_0", state(2))
                else:
                    series.save(state(2))
                os._exit(0)
            return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

        status = survive(tmp_path, kill, overwrite=overwrite, number=2)
        if status == 0:
            return
        assert status == -signal.SIGKILL
        accel_ckpt.save(tmp_path / ("checkpoint_0" if overwrite else "checkpoint_1"), state(1))
        for extra in ("checkpoint_2", "checkpoint_3"):
            subprocess.run(["rm", "-rf", str(tmp_path / extra)], check=True)
    pytest.fail("200 calls were not enough to save")


def random_kills(folder: Path, count: int, seed: int) -> int:
    """How many of ``count`` saves were really cut short, each killed at a random time."""
    dice = random.Random(seed)
    CheckpointDirectory(folder).save(state(0, 200_000))
    cut = 0
    for _ in range(count):
        latest = CheckpointDirectory(folder).latest()
        assert latest is not None
        number = check(latest) + 1
        child = os.fork()
        if child == 0:
            try:
                CheckpointDirectory(folder, retention=keep_last(2)).save(state(number, 200_000))
            finally:
                os._exit(0)
        time.sleep(dice.random() * 0.03)
        os.kill(child, signal.SIGKILL)
        cut += os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0
        series = CheckpointDirectory(folder)
        series.sweep()
        latest = series.latest()
        assert latest is not None
        assert check(latest) in (number - 1, number)
        assert not [name for name in os.listdir(folder) if name.startswith(".")]
    return cut


@pytest.mark.fault
def test_writers_killed_at_random_times(tmp_path: Path) -> None:
    random_kills(tmp_path, 10, seed=1)


@pytest.mark.slow
@pytest.mark.fault
def test_two_hundred_writers_killed_at_random_times(tmp_path: Path) -> None:
    assert random_kills(tmp_path, 200, seed=2) > 100


def test_a_rank_that_dies_fails_the_save_on_the_others(tmp_path: Path) -> None:
    children = []
    for rank in range(2):
        child = os.fork()
        if child == 0:
            try:
                _rank_that_may_die(tmp_path, rank)
            except CheckpointError as error:
                os._exit(7 if "a rank is gone" in str(error) else 8)
            finally:
                os._exit(9)
        children.append(child)
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [7, -signal.SIGKILL]
    series = CheckpointDirectory(tmp_path / "series")
    latest = series.latest()
    assert latest is not None
    assert check(latest) == 0
    assert os.listdir(series.path) == ["checkpoint_0"]


def _rank_that_may_die(folder: Path, rank: int) -> None:
    import datetime

    import torch.distributed as dist

    from accel_ckpt.peers import Peers
    from accel_ckpt.saving import Attempt

    store = dist.FileStore(str(folder / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=datetime.timedelta(seconds=20))
    CheckpointDirectory(folder / "series").save(state(0))
    peers = Peers.of(None)
    attempt = Attempt.begin(peers, folder / "series" / "checkpoint_1", state(1))
    if rank == 1:
        attempt.witness = lambda stage: os.kill(os.getpid(), signal.SIGKILL) if stage == "written" else None
    attempt.finish(peers, attempt.part.pieces)


def test_a_full_disk_says_what_it_needs_and_a_retry_works(tmp_path: Path) -> None:
    series = CheckpointDirectory(tmp_path)
    series.save(state(0))

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, resource.RLIM_INFINITY))
        with pytest.raises(CheckpointError, match=r"File too large after \d+ bytes; \d+ bytes are free"):
            series.save(state(1, 100_000))
        assert os.listdir(tmp_path) == ["checkpoint_0"]
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        series.save(state(1, 100_000))

    assert in_child(limited) == 0
    latest = series.latest()
    assert latest is not None
    assert check(latest) == 1


def test_a_small_file_system_that_fills_up_keeps_what_it_has(tmp_path: Path) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if os.geteuid() != 0 or libc.mount(b"tmpfs", os.fsencode(tmp_path), b"tmpfs", 0, b"size=1m") != 0:
        pytest.skip("mounting a small tmpfs needs root")
    try:
        series = CheckpointDirectory(tmp_path)
        series.save(state(0))
        (tmp_path / "other").write_bytes(b"x" * 300_000)
        with pytest.raises(CheckpointError, match="No space left on device after .* free"):
            series.save(state(1, 33_000))
        assert check(series.latest()) == 0  # type: ignore[arg-type]
        (tmp_path / "other").unlink()
        series.save(state(1, 33_000))
        assert check(series.latest()) == 1  # type: ignore[arg-type]
    finally:
        libc.umount2(os.fsencode(tmp_path), 2)


def test_two_runs_in_one_folder_never_mix(tmp_path: Path) -> None:
    def run(number: int) -> int:
        child = os.fork()
        if child == 0:
            series = CheckpointDirectory(tmp_path, retention=keep_last(3))
            for _ in range(12):
                try:
                    series.save(state(number))
                    series.sweep()
                except CheckpointError as error:
                    if "is there already" not in str(error) and "not empty" not in str(error):
                        os.write(2, f"{error}\n".encode())
                        os._exit(9)
            os._exit(0)
        return child

    children = [run(3), run(4)]
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0, 0]
    series = CheckpointDirectory(tmp_path)
    found = [check(accel_ckpt.open_checkpoint(entry.path)) for entry in series.entries()]
    assert set(found) <= {3, 4}
    assert len(found) >= 3
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]

"""Writers that die, at every call to the system and at any time, disks that are full, and two runs in one folder."""

import os
import random
import resource
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

import accel_ckpt
from accel_ckpt import CheckpointDirectory, keep_last
from accel_ckpt.io.atomic_folder import Staging
from accel_ckpt.saving.transaction import open_saved
from accel_state.errors import CheckpointError
from accel_testing.faults.faults import injected, make_read_only, small_file_system

FULL = r" after \d+ bytes of the \d+ that it needs; \d+ bytes are free there"
SYSTEM_CALLS = ("open", "close", "mkdir", "rmdir", "pwritev", "fsync", "rename", "unlink", "preadv")


def state(number: int, size: int = 3000) -> dict[str, Any]:
    return {"model": {f"w{i}": torch.full((size,), number * 10 + i) for i in range(3)}, "n": number}


def check(saved: accel_ckpt.Checkpoint) -> int:
    number: int = saved.read("n")
    for key, value in saved.read("model").items():
        assert torch.equal(value, torch.full_like(value, number * 10 + int(key[1:])))
    return number


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
    from accel_ckpt.io import atomic_folder as staging

    staging._exchange = count(staging._exchange)  # type: ignore[assignment]


def in_fork(work: Callable[[], object]) -> int:
    """Starts ``work`` in a fork. It must not compute with torch, whose threads do not survive a fork."""
    child = os.fork()
    if child == 0:
        status = 9
        try:
            work()
            status = 0
        except BaseException as error:
            os.write(2, f"{type(error).__name__}: {error}\n".encode())
        finally:
            os._exit(status)
    return child


def status_of(child: int) -> int:
    """How a fork ended: its exit status, negative if a signal ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def error_of(work: Callable[[], object]) -> str | None:
    """What ``work`` fails with, if it does."""
    try:
        work()
    except CheckpointError as error:
        return str(error)
    return None


def check_series(folder: Path, expected: set[int]) -> int:
    """After a sweep there is a whole newest checkpoint with one of the expected contents, and no leftover."""
    series = CheckpointDirectory(folder)
    series.sweep()
    latest = series.latest()
    assert latest is not None, "no whole checkpoint is left"
    number = check(latest)
    assert number in expected
    assert not [name for name in os.listdir(folder) if name.startswith(".")]
    return number


@pytest.mark.sampled(4)
@pytest.mark.parametrize("overwrite", [False, True], ids=["series", "overwriting"])
@pytest.mark.parametrize("stretch", range(4))
def test_a_writer_killed_at_any_call_leaves_a_complete_checkpoint(
    tmp_path: Path, stretch: int, overwrite: bool
) -> None:
    before, after = state(1), state(2)
    for call in range(1 + stretch, 200, 4):
        folder = tmp_path / str(call)
        series = CheckpointDirectory(folder, retention=keep_last(1))
        series.save(before)

        def work(call: int = call, series: CheckpointDirectory = series) -> None:
            die_at(call)
            if overwrite:
                accel_ckpt.save(series.path / "checkpoint_0", after)
            else:
                series.save(after)

        status = status_of(in_fork(work))
        assert status in (0, -signal.SIGKILL)
        found = check_series(folder, {1, 2})
        if status == 0:
            assert found == 2
            return
    pytest.fail("200 calls were not enough to save")


def random_kills(folder: Path, count: int, seed: int) -> int:
    """How many of ``count`` saves were really cut short, each killed at a random time."""
    dice = random.Random(seed)
    CheckpointDirectory(folder).save(state(0, 200_000))
    cut = 0
    for _ in range(count):
        number = check_series(folder, set(range(count + 1))) + 1
        content = state(number, 200_000)
        child = in_fork(lambda content=content: CheckpointDirectory(folder, retention=keep_last(2)).save(content))  # type: ignore[misc]
        time.sleep(dice.random() * 0.03)
        os.kill(child, signal.SIGKILL)
        cut += status_of(child) != 0
        check_series(folder, {number - 1, number})
    return cut


@pytest.mark.fault
def test_writers_killed_at_random_times(tmp_path: Path) -> None:
    assert random_kills(tmp_path, 10, seed=1) > 0, "no save was cut short, so nothing was tried"


@pytest.mark.slow
@pytest.mark.fault
@pytest.mark.parametrize("seed", range(2, 12))
def test_two_hundred_writers_killed_at_random_times(tmp_path: Path, seed: int) -> None:
    """Twenty of them each time."""
    assert random_kills(tmp_path, 20, seed=seed) > 5


DEATHS = [
    ("write", {1}),
    ("written", {1}),
    ("write", {0}),
    ("seal", {0}),
    ("commit", {0}),
    ("committed", {0}),
    ("written", {0, 1}),
]


@pytest.mark.parametrize(("stage", "dying"), DEATHS, ids=lambda value: str(value))
@pytest.mark.sampled(2)
def test_ranks_that_die_at_any_stage_fail_the_save_on_the_others(tmp_path: Path, stage: str, dying: set[int]) -> None:
    before, after = state(0), state(1)
    children = [
        in_fork(lambda rank=rank: _rank_that_may_die(tmp_path, rank, before, after, stage if rank in dying else ""))  # type: ignore[misc]
        for rank in range(2)
    ]
    expected = [-signal.SIGKILL if rank in dying else 0 for rank in range(2)]
    assert [status_of(child) for child in children] == expected
    assert check_series(tmp_path / "series", {0, 1}) == (stage == "committed")


def _rank_that_may_die(folder: Path, rank: int, before: dict[str, Any], after: dict[str, Any], stage: str) -> None:
    group = _joined(folder, rank)
    CheckpointDirectory(folder / "series").save(before)
    _attempt_and_die(folder / "series" / "checkpoint_1", group, after, stage)


def _joined(folder: Path, rank: int) -> Any:
    """The group of two ranks."""
    import datetime

    import torch.distributed as dist

    store = dist.FileStore(str(folder / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=datetime.timedelta(seconds=60))
    return dist.group.WORLD


def _attempt_and_die(target: Path, group: Any, after: dict[str, Any], stage: str) -> None:
    """A save in which this rank dies at a stage, or hears that another has."""
    from accel_ckpt.rank_group import RankGroup
    from accel_ckpt.saving.plan import make_draft
    from accel_ckpt.saving.transaction import SaveTransaction

    peers = RankGroup.of(group)
    transaction = SaveTransaction.begin(peers, target, lambda apart: make_draft(after, None, None, peers, apart))
    transaction.on_stage = lambda now: os.kill(os.getpid(), signal.SIGKILL) if now == stage else None
    with pytest.raises(CheckpointError, match="a rank is gone or does not answer"):
        transaction.finish(peers, transaction.part.pieces)


@pytest.mark.parametrize(
    "place", ["os:pwritev", "os:fsync", "os:mkdir", "os:rename", "accel_ckpt.io.atomic_folder:_exchange", "os:open"]
)
@pytest.mark.parametrize("call", [1, 2, 3])
def test_a_disk_that_fails_leaves_what_was_there(tmp_path: Path, place: str, call: int) -> None:
    """Whichever call to the system fails: the save says so and nothing changes, or it did not need that call."""
    target = accel_ckpt.save(tmp_path / "one", state(1)).path
    with injected(f"raise(EIO) at call {call} of {place}"):
        said = error_of(lambda: accel_ckpt.save(target, state(2)))
    assert said is None or "Input/output error" in said
    found = check(accel_ckpt.open_checkpoint(target))
    assert found in ({2} if said is None else {1, 2})
    CheckpointDirectory(tmp_path).sweep()
    assert os.listdir(tmp_path) == ["one"]
    accel_ckpt.save(target, state(3))
    assert check(accel_ckpt.open_checkpoint(target)) == 3


def test_a_disk_that_cannot_be_read_names_the_file(tmp_path: Path) -> None:
    accel_ckpt.save(tmp_path / "one", state(1))
    with (
        injected("raise(EIO) at call 3 of os:preadv"),
        pytest.raises(CheckpointError, match=r"(tree\.json|tensors-00000\.safetensors): byte 0 cannot be read"),
    ):
        accel_ckpt.open_checkpoint(tmp_path / "one")


@pytest.mark.parametrize("fault", ["raise(EACCES) at call 1 of os:open", "raise(ESTALE) at call 3 of os:preadv"])
def test_no_older_checkpoint_is_taken_for_one_that_the_system_does_not_let_read(tmp_path: Path, fault: str) -> None:
    series = CheckpointDirectory(tmp_path)
    for number in range(2):
        series.save(state(number))
    with (
        injected(fault),
        pytest.raises(CheckpointError, match=r"/checkpoint_1/.*: (Permission denied|Stale file handle)"),
    ):
        series.latest()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("call", [1, 2, 3])
def test_a_rank_that_cannot_read_the_newest_checkpoint_is_an_error_on_all(tmp_path: Path, rank: int, call: int) -> None:
    series = CheckpointDirectory(tmp_path)
    for number in range(2):
        series.save(state(number))
    with (
        injected(f"raise(EACCES) at call {call} of os:open on rank 1", rank=rank),
        pytest.raises(CheckpointError, match="Permission denied") if call > 1 else nullcontext(),
    ):
        latest = series.latest()
        assert call == 1
        assert latest is not None
        assert check(latest) == 1, "the ranks look again"


@pytest.mark.ranks(2)
def test_a_rank_whose_disk_fails_fails_the_save_on_all(tmp_path: Path, rank: int) -> None:
    series = CheckpointDirectory(tmp_path)
    series.save(state(0, 100_000))
    with (
        injected("raise(EIO) at os:pwritev on rank 1", rank=rank),
        pytest.raises(CheckpointError, match=r"Input/output error" if rank == 1 else r"rank 1 failed with .*Input/"),
    ):
        series.save(state(1, 100_000))
    torch.distributed.barrier()
    assert os.listdir(tmp_path) == ["checkpoint_0"]
    series.save(state(2, 100_000))
    latest = series.latest()
    assert latest is not None
    assert check(latest) == 2


@pytest.mark.ranks(2)
def test_a_slow_rank_is_waited_for(tmp_path: Path, rank: int) -> None:
    with injected("delay(1) at os:pwritev on rank 1", rank=rank):
        saved = accel_ckpt.save(tmp_path / "one", state(1, 100_000))
    saved.verify()
    assert check(saved) == 1


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB; skips the test where none may be mounted."""
    with ExitStack() as stack:
        try:
            stack.enter_context(small_file_system(tmp_path))
        except PermissionError as error:
            pytest.skip(str(error))
        yield tmp_path


def test_a_target_that_is_read_only_is_a_clear_error(small_disk: Path) -> None:
    series = CheckpointDirectory(small_disk)
    series.save(state(0))
    make_read_only(small_disk)
    with pytest.raises(CheckpointError, match="cannot be written: Read-only file system"):
        series.save(state(1))
    latest = series.latest()
    assert latest is not None
    assert check(latest) == 0


def test_a_target_that_is_a_mount_point_is_refused_before_anything_is_written(small_disk: Path) -> None:
    with pytest.raises(CheckpointError, match=r"is a mount point.* give a folder in it: .*/checkpoint"):
        accel_ckpt.save(small_disk, state(1))
    assert [name for name in os.listdir(small_disk.parent) if name.startswith(f".{small_disk.name}.")] == []
    accel_ckpt.save(small_disk / "checkpoint", state(1))


def test_clocks_that_differ_change_neither_order_nor_what_is_swept(tmp_path: Path) -> None:
    series = CheckpointDirectory(tmp_path)
    for number in range(3):
        series.save(state(number))
    for number, when in enumerate((4e9, 2e9, 0)):  # the newest has the oldest time
        os.utime(tmp_path / f"checkpoint_{number}", (when, when))
        os.utime(tmp_path / f"checkpoint_{number}" / "manifest.json", (when, when))
    alive = Staging(tmp_path / "checkpoint_3", overwrite=False)
    (tmp_path / alive.folder.name / "half").write_text("")
    dead = tmp_path / ".checkpoint_4.0123456789abcdef.staging"
    dead.mkdir()
    for leftover in (dead, tmp_path / alive.folder.name):
        os.utime(leftover, (4e9, 4e9))  # by a clock that is decades ahead
    assert [path.name for path in series.sweep()] == [dead.name]
    latest = series.latest()
    assert latest is not None
    assert check(latest) == 2
    alive.drop()


def test_a_full_disk_says_what_it_needs_and_a_retry_works(tmp_path: Path) -> None:
    series = CheckpointDirectory(tmp_path)
    series.save(state(0))
    large = state(1, 100_000)

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, resource.RLIM_INFINITY))
        with pytest.raises(CheckpointError, match="File too large" + FULL):
            series.save(large)
        assert os.listdir(tmp_path) == ["checkpoint_0"]
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        series.save(large)

    assert status_of(in_fork(limited)) == 0
    assert check_series(tmp_path, {1}) == 1


def test_a_small_file_system_that_fills_up_keeps_what_it_has(small_disk: Path) -> None:
    series = CheckpointDirectory(small_disk)
    series.save(state(0))
    (small_disk / "other").write_bytes(b"x" * 300_000)
    with pytest.raises(CheckpointError, match="No space left on device" + FULL):
        series.save(state(1, 33_000))
    assert check(series.latest()) == 0  # type: ignore[arg-type]
    (small_disk / "other").unlink()
    series.save(state(1, 33_000))
    assert check(series.latest()) == 1  # type: ignore[arg-type]


def test_a_checkpoint_that_another_run_has_removed_says_so(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="checkpoint_1 was saved, and has been removed since by another run"):
        open_saved(tmp_path / "checkpoint_1")
    (tmp_path / "checkpoint_1").mkdir()
    with pytest.raises(CheckpointError, match="not a complete checkpoint"):
        open_saved(tmp_path / "checkpoint_1")


def test_two_runs_in_one_folder_never_mix(tmp_path: Path) -> None:
    def run(content: dict[str, Any]) -> None:
        series = CheckpointDirectory(tmp_path, retention=keep_last(3))
        for _ in range(12):
            try:
                series.save(content)
                series.sweep()
            except CheckpointError as error:
                expected = ("is there already", "not empty", "save again", "removed since by another run")
                if not any(said in str(error) for said in expected):
                    raise

    three, four = state(3), state(4)
    children = [in_fork(lambda: run(three)), in_fork(lambda: run(four))]
    assert [status_of(child) for child in children] == [0, 0]
    check_series(tmp_path, {3, 4})
    found = [check(accel_ckpt.open_checkpoint(entry.path)) for entry in CheckpointDirectory(tmp_path).entries()]
    assert set(found) <= {3, 4}
    assert len(found) >= 3


NODE_DEATHS = [("copy", {1}), ("seal", {0}), ("seal", {1}), ("commit", {0}), ("commit", {1}), ("copy", {0, 1})]


@pytest.mark.parametrize(("stage", "dying"), NODE_DEATHS, ids=lambda value: str(value))
@pytest.mark.sampled(2)
def test_machines_that_die_at_any_stage_leave_what_both_have(tmp_path: Path, stage: str, dying: set[int]) -> None:
    """Each of two ranks keeps a copy on a disk of its own."""
    before, after = state(0, 50_000), state(1, 50_000)
    children = [
        in_fork(lambda rank=rank: _machine_that_may_die(tmp_path, rank, before, after, stage if rank in dying else ""))  # type: ignore[misc]
        for rank in range(2)
    ]
    expected = [-signal.SIGKILL if rank in dying else 0 for rank in range(2)]
    assert [status_of(child) for child in children] == expected
    both = set.intersection(*({one.number for one in CheckpointDirectory(disk).entries()} for disk in disks(tmp_path)))
    for disk in disks(tmp_path):
        CheckpointDirectory(disk).sweep()
        assert not [name for name in os.listdir(disk) if name.startswith(".")]
        assert check(accel_ckpt.open_checkpoint(disk / f"checkpoint_{max(both)}")) == 0


def disks(folder: Path) -> list[Path]:
    return [folder / f"disk{rank}" for rank in range(2)]


def _machine_that_may_die(folder: Path, rank: int, before: dict[str, Any], after: dict[str, Any], stage: str) -> None:
    nodes = accel_ckpt.PerNode(_joined(folder, rank), node=rank)
    series = CheckpointDirectory(disks(folder)[rank], retention=keep_last(1), group=nodes)
    series.save(before)
    _attempt_and_die(series.path / "checkpoint_1", nodes, after, stage)

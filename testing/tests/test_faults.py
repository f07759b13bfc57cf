"""Faults are real, happen at the named call, on the named rank, and end with their context."""

import contextlib
import os
import signal
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accel_testing.errors import RankDied, RankHung
from accel_testing.faults.faults import (
    Fault,
    corrupt_file,
    injected,
    limited_file_size,
    make_read_only,
    small_file_system,
    truncate_file,
)
from accel_testing.programs.runs import run_command
from accel_testing.ranks.pool import RankPool


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("kill at os:replace", Fault("kill", "os:replace")),
        ("raise(EIO) after os:fsync", Fault("raise", "os:fsync", value="EIO", after=True)),
        ("delay(0.5) before call 3 of a.b:C.d on rank 1", Fault("delay", "a.b:C.d", value="0.5", call=3, rank=1)),
    ],
)
def test_faults_are_read(text: str, fault: Fault) -> None:
    assert Fault.parse(text) == fault


@given(st.text(alphabet="kil at:os.()123 ", max_size=30))
def test_nonsense_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match=r"expected ACTION|there are: kill"):
        Fault.parse(text)


def test_function_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="os has no function 'replaze'"), injected("kill at os:replaze"):
        pass


def test_raises_at_the_named_call_only(tmp_path: Path) -> None:
    done = []
    with injected("raise(ENOSPC) before call 2 of os:mkdir"):
        for name in "abc":
            with contextlib.suppress(OSError):
                os.mkdir(tmp_path / name)
                done.append(name)
    os.mkdir(tmp_path / "d")
    assert done == ["a", "c"]


def test_after_means_that_it_was_done(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="space"), injected("raise after os:mkdir"):
        os.mkdir(tmp_path / "made")
    assert (tmp_path / "made").is_dir()


def test_delay_delays() -> None:
    began = time.monotonic()
    with injected("delay(0.1) at os:getcwd"):
        os.getcwd()
    assert time.monotonic() - began >= 0.1


def test_other_ranks_are_spared() -> None:
    here = os.getcwd()
    with injected("raise at os:getcwd on rank 1", rank=0):
        assert os.getcwd() == here


@pytest.mark.fault
def test_kill_and_stop_are_real(rank_pool: RankPool) -> None:
    def meet(fault: str) -> None:
        import torch.distributed as dist

        with injected(fault):
            os.getcwd()
        dist.barrier()

    with pytest.raises(RankDied, match=r"rank 1 was killed by SIGKILL"):
        rank_pool.run(meet, "kill at os:getcwd on rank 1")
    rank_pool.run(meet, "delay(0) at os:getcwd")  # the ranks are new, and have now imported what this needs
    with pytest.raises(RankHung, match=r"rank 0 did not answer in \d+ s \(the process is stopped"):
        rank_pool.run(meet, "stop at os:getcwd on rank 0", timeout=2.0)


def test_script_runs_with_a_fault(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import os, sys\nprint(sys.argv[1:], flush=True)\nos.getcwd()\nprint('not reached')\n")
    done = run_command([sys.executable, "-m", "accel_testing.faults.faults", "kill at os:getcwd", script, "--a", "1"])
    assert done.statuses == (-signal.SIGKILL,)
    assert done.output == "['--a', '1']\n"


def test_full_disk_refuses_to_grow_a_file(tmp_path: Path) -> None:
    with limited_file_size(1000), pytest.raises(OSError, match="large"):
        (tmp_path / "file").write_bytes(b"x" * 5000)
    (tmp_path / "file").write_bytes(b"x" * 5000)


@pytest.mark.parametrize("position", [None, 0, -1])
def test_one_bit_flips_and_nothing_else_shows(tmp_path: Path, position: int | None) -> None:
    file = tmp_path / "file"
    file.write_bytes(bytes(100))
    before = file.stat()
    where = corrupt_file(file, position=position)
    data = file.read_bytes()
    assert [index for index, byte in enumerate(data) if byte] == [where]
    assert (file.stat().st_mtime_ns, len(data)) == (before.st_mtime_ns, 100)


@pytest.mark.parametrize(("keep", "size"), [(0.5, 50), (7, 7), (0, 0)])
def test_file_is_cut(tmp_path: Path, keep: float, size: int) -> None:
    file = tmp_path / "file"
    file.write_bytes(bytes(100))
    assert truncate_file(file, keep=keep) == size == file.stat().st_size


def test_cut_beyond_the_end_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(10))
    with pytest.raises(ValueError, match="keep=11 of a file of 10 bytes"):
        truncate_file(tmp_path / "file", keep=11)


def test_a_small_file_system_is_full_or_read_only_for_root_too(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(small_file_system(tmp_path, size=2**14))
        except PermissionError as error:
            pytest.skip(str(error))
        with pytest.raises(OSError, match="No space left on device"):
            (tmp_path / "large").write_bytes(b"x" * 2**15)
        (tmp_path / "large").unlink()
        (tmp_path / "small").write_bytes(b"x")
        make_read_only(tmp_path)
        with pytest.raises(OSError, match="Read-only file system"):
            (tmp_path / "other").write_bytes(b"x")
        assert (tmp_path / "small").read_bytes() == b"x"
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(OSError, match="Invalid argument"):
        make_read_only(tmp_path)

"""Supervision of processes in this process: without torch, and without a launcher of its own."""

import errno
import io
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from accel_launch.config import resolve_config
from accel_launch.launch.host import HostFacts
from accel_launch.launch.launch_plan import ProcessPlan, plan
from accel_launch.launch.supervisor.child_processes import Workers
from accel_launch.launch.supervisor.interrupts import Interrupts
from accel_launch.launch.supervisor.orphan_reaper import Guard
from accel_launch.launch.supervisor.output import Output
from accel_launch.launch.supervisor.supervisor import run_local


@pytest.fixture
def ignored_children() -> Iterator[None]:
    """The end of child processes is ignored, as by the parents of some servers."""
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    yield
    assert signal.signal(signal.SIGCHLD, before) is signal.SIG_IGN


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[Workers]:
    with Interrupts() as interrupts, Guard() as guard:
        yield Workers(folder=tmp_path, output=None, interrupts=interrupts, guard=guard)


def statuses(workers: Workers, *commands: str) -> list[int]:
    """Exit statuses of shell commands that failed, each run as a rank."""
    processes = [ProcessPlan(rank, rank, ("/bin/sh", "-c", command), {}) for rank, command in enumerate(commands)]
    try:
        workers.start(processes, {})
        while workers.running:
            workers.wait(1.0)
    finally:
        workers.close()
    return sorted(failure.exit.status for failure in workers.failures())


def test_ends_are_noticed_where_the_kernel_offers_no_descriptors_of_processes(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(pid: int) -> int:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(os, "pidfd_open", refuse, raising=False)
    assert statuses(workers, "exit 0", "exit 3") == [3]


@pytest.mark.usefixtures("ignored_children")
def test_statuses_are_known_where_the_launchers_parent_ignored_the_end_of_children(tmp_path: Path) -> None:
    with Interrupts() as interrupts, Guard() as guard:
        workers = Workers(folder=tmp_path, output=None, interrupts=interrupts, guard=guard)
        assert statuses(workers, "exit 0", "exit 3") == [3]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a disk that is always full")
def test_a_full_disk_costs_lines_of_the_log_and_not_the_process(
    tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    (tmp_path / "rank_0.log").symlink_to("/dev/full")
    output, shown = Output(prefix=True, folder=tmp_path), io.BytesIO()
    reader, writer = os.pipe()
    output.keep_log(0)
    output.follow(0, os.fdopen(reader, "rb"), shown)
    for line in (b"one\n", b"two\n"):
        os.write(writer, line)
        while line not in shown.getvalue():
            assert output._threads[0].is_alive()
            time.sleep(0.001)
    os.close(writer)
    output.note(0, "Traceback")
    output.close()
    assert capfdbinary.readouterr().err.count(b"the log of rank 0 is incomplete: No space left on device") == 1


def test_logs_of_an_earlier_launch_are_kept(tmp_path: Path) -> None:
    for text in ("preempted\n", "resumed\n"):
        output = Output(prefix=False, folder=tmp_path)
        output.keep_log(0)
        output.note(0, text)
        output.close()
    assert (tmp_path / "rank_0.log").read_text() == "preempted\nresumed\n"


def test_a_run_is_started_again_after_its_temporary_folder_was_cleared_away() -> None:
    command = (
        'folder=$(dirname "$TORCHELASTIC_ERROR_FILE"); if [ "$TORCHELASTIC_RESTART_COUNT" = 1 ]; then exit 0; fi; '
        'if [ "$RANK" = 1 ]; then sleep 60; fi; rm -rf "$(dirname "$folder")"; exit 3'
    )
    config = resolve_config({"num_processes": 2, "no_python": True, "max_restarts": 1, "cpu": True, "quiet": True}, {})
    made = plan(config, ["/bin/sh", "-c", command], HostFacts(sys.executable, 2, None, 0), env={})
    assert run_local(made) == 0


class ClosedTerminal(io.StringIO):
    """Stream of a terminal that is gone."""

    def write(self, text: str) -> int:
        """Fails as the system does."""
        raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_a_run_is_started_again_though_nobody_can_read_why(monkeypatch: pytest.MonkeyPatch) -> None:
    config = resolve_config({"num_processes": 2, "no_python": True, "max_restarts": 1, "cpu": True}, {})
    command = ["/bin/sh", "-c", "exit $((TORCHELASTIC_RESTART_COUNT == 0))"]
    made = plan(config, command, HostFacts(sys.executable, 2, None, 0), env={})
    monkeypatch.setattr(sys, "stderr", ClosedTerminal())
    assert run_local(made) == 0

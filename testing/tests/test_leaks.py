"""What tests leave behind is found: by name, in this process and in programs, however deep they were started."""

import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from accel_testing import offspring
from accel_testing.leaks import CHECKS, differences, parse_checks, settled_differences, snapshot

LEAVE = "sleep 120 >/dev/null 2>&1 & echo $!; mktemp -d"


@pytest.fixture
def marked() -> Iterator[None]:
    """Programs of this test are told from those of others; afterwards all is as before."""
    before = dict(os.environ)
    os.environ.pop(offspring.VARIABLE, None)
    offspring.mark()
    yield
    offspring.unmark()
    os.environ.clear()
    os.environ.update(before)


@pytest.mark.usefixtures("marked")
def test_processes_and_files_of_programs_are_found_after_their_parent_has_ended() -> None:
    before = snapshot(("processes", "temporary"))
    done = subprocess.run(["setsid", "sh", "-c", LEAVE], capture_output=True, text=True, check=True)
    pid, folder = done.stdout.split()
    try:
        found = differences(before, snapshot(before.seen))
        assert sorted(found) == [
            f"process {pid} still runs: sleep 120",
            f"temporary {folder} (a folder) is still there",
        ]
    finally:
        os.kill(int(pid), signal.SIGKILL)
        shutil.rmtree(folder)
    assert settled_differences(before, grace=30) == []


@pytest.mark.usefixtures("marked")
def test_what_ends_by_itself_soon_is_waited_for() -> None:
    before = snapshot(("processes",))
    subprocess.run(["sh", "-c", "sleep 0.3 >/dev/null 2>&1 &"], check=True)
    assert settled_differences(before, grace=30) == []


@pytest.mark.usefixtures("marked")
def test_a_port_that_listens_is_found() -> None:
    before = snapshot(("ports",))
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert differences(before, snapshot(before.seen)) == [f"port {port} is still open"]
    assert differences(before, snapshot(before.seen)) == []


def test_programs_of_other_sessions_are_nobodys_business(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(offspring.VARIABLE, f"1:{tmp_path}")  # inherited from the process that marked
    (tmp_path / "file").touch()
    assert offspring.files() == offspring.numbers() == []


def test_a_check_that_does_not_exist_is_refused() -> None:
    assert parse_checks(["all", "ports"]) == tuple(CHECKS)
    with pytest.raises(ValueError, match="no leak check 'port'; there are: all, environment"):
        parse_checks(["port"])

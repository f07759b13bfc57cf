"""Leaks of tests are found: by name, in this process and in programs, however deep they were started."""

import importlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from accel_testing.faults import children as offspring
from accel_testing.faults.leaks import CHECKS, differences, parse_checks, settled_differences, snapshot
from accel_testing.programs.runs import run_command

REMOVED = """
import os
from accel_testing.faults.leaks import differences, snapshot

names = [f"LEFT_{number}" for number in range(12)]
os.environ.update(dict.fromkeys(names, ""))
before = snapshot(["environment"])
for name in names:
    del os.environ[name]
print(*differences(before, snapshot(["environment"])), sep="\\n")
"""
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


def test_a_folder_that_an_import_made_is_the_librarys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "library_with_a_folder.py").write_text("import tempfile; folder = tempfile.mkdtemp()")
    monkeypatch.syspath_prepend(tmp_path)
    before = snapshot(("temporary",))
    library = importlib.import_module("library_with_a_folder")
    assert differences(before, snapshot(before.seen)) == []
    own = tempfile.mkdtemp()
    assert differences(before, snapshot(before.seen)) == [f"temporary {own} (a folder) is still there"]
    for folder in (own, library.folder):
        os.rmdir(folder)


@pytest.mark.usefixtures("marked")
def test_a_port_that_listens_is_found() -> None:
    before = snapshot(("ports",))
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert differences(before, snapshot(before.seen)) == [f"port {port} is still open"]
    assert differences(before, snapshot(before.seen)) == []


@pytest.mark.usefixtures("marked")
def test_what_killed_processes_left_is_removed_and_what_living_ones_use_stays() -> None:
    folder = Path(os.environ["TMPDIR"])
    for name in ("before", "killed", "alive"):
        (folder / name).mkdir()
    before = [folder / "before"]
    (folder / "killed" / "listener").touch()
    (folder / "file").touch()
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(folder / "alive" / "listener"))
        server.listen()
        offspring.sweep(before)
        assert {path.name for path in offspring.files()} == {"before", "alive"}
    offspring.sweep(before)
    assert offspring.files() == before


def test_programs_of_other_sessions_are_nobodys_business(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(offspring.VARIABLE, f"1:{tmp_path}")  # inherited from the process that marked
    (tmp_path / "file").touch()
    assert offspring.files() == offspring.numbers() == []


FIXTURE = """
import subprocess
import pytest

@pytest.fixture(scope="module")
def careless():
    yield
    subprocess.Popen(["sleep", "60"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

def test_first(careless): pass
def test_second(careless): pass
"""


def test_what_a_fixture_of_many_tests_leaves_is_found_after_the_last(tmp_path: Path) -> None:
    (tmp_path / "test_careless.py").write_text(FIXTURE)
    (tmp_path / "pytest.ini").write_text("[pytest]\naccel_leaks = all\naccel_leaks_grace = 0\n")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--basetemp", "base"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    left = re.search(r"fixtures left behind:\n\s+process (\d+) still runs: sleep 60", done.stdout)
    assert left is not None, done.stdout + done.stderr
    os.kill(int(left[1]), signal.SIGKILL)
    assert "2 passed, 1 error" in done.stdout


def test_a_check_that_does_not_exist_is_refused() -> None:
    assert parse_checks(["all", "ports"]) == tuple(CHECKS)
    with pytest.raises(ValueError, match="no leak check 'port'; there are: all, environment"):
        parse_checks(["port"])


def test_leaks_are_in_one_order_whatever_the_hash_seed() -> None:
    """Otherwise ranks that left the same behind would report it in different sentences."""
    run = run_command([sys.executable, "-c", REMOVED], env=[{"PYTHONHASHSEED": seed} for seed in "12"]).check()
    assert run.outputs[0] == run.outputs[1]
    assert run.outputs[0].count("was removed") == 12

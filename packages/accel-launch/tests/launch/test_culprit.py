"""The rank that ``accel launch`` names as the first to fail: the culprit, with its line, and never one that waited."""

import re
import sys
from pathlib import Path

import pytest

from accel_testing import run_command

PROGRAM = Path(__file__).with_name("failing_ranks.py")
# Each kind of failure, its rank, what the first line says of it, and the mark of the line that must be in the report.
KINDS = {
    "first": (0, "failed first", "first"),
    "worker": (1, "failed first", "worker"),
    "hook": (1, "failed first", "hook"),
    "killed": (1, "killed by SIGKILL", None),
    "exit3": (1, "exit status 3", "exit"),
    "exit0": (1, "ended first", "exit"),
}
STATUS = {"killed": 137, "exit3": 3}
TORCHRUN = ("first", "worker", "killed", "exit3")


def place(mark: str | None) -> str:
    """A pattern for the program's line with this mark; any of its lines for a rank that could write nothing."""
    if mark is None:
        return rf"rank 1 is dead .*{PROGRAM.name}:\d+"
    lines = PROGRAM.read_text().splitlines()
    number = next(number for number, line in enumerate(lines, 1) if line.endswith(f"# line: {mark}"))
    return rf'{PROGRAM.name}(:|", line ){number}\b'


def check_report(kind: str, folder: Path) -> None:
    rank, words, mark = KINDS[kind]
    argv = [sys.executable, "-m", "accel", "launch", "--cpu", "--num_processes", "2", str(PROGRAM), kind]
    done = run_command(argv, cwd=folder, timeout=200)
    assert done.status == STATUS.get(kind, 1), done.output
    said = done.output[done.output.index("accel launch: rank ") :]
    head = said.splitlines()[0]
    assert head.startswith(f"accel launch: rank {rank} of 2 "), said
    assert words in head, said
    assert re.search(place(mark), said), said
    assert said.count(" first (") == 1, said
    assert "because of another rank (" not in head, said


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=() if kind in ("first", "worker", "killed") else pytest.mark.slow) for kind in KINDS],
)
def test_the_culprit_and_its_line_are_named_first(kind: str, tmp_path: Path) -> None:
    check_report(kind, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("kind", KINDS)
def test_the_culprit_is_named_first_in_ten_launches_of_ten(kind: str, tmp_path: Path) -> None:
    for _ in range(10):
        check_report(kind, tmp_path)


def check_torchrun(kind: str, folder: Path) -> None:
    rank = KINDS[kind][0]
    argv = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(PROGRAM), kind]
    done = run_command(argv, cwd=folder, env={"ACCELERATE_USE_CPU": "1"}, timeout=200).check_failed()
    root = done.output[done.output.index("Root Cause") :]
    assert re.search(rf"rank +: {rank} ", root), done.output
    if KINDS[kind][1] == "failed first":
        raised = re.search(r"^.*KeyError: 'no such \w+'$", done.output, re.MULTILINE)
        assert raised is not None, done.output
        assert "another rank" not in done.output[: raised.start()], done.output
        assert re.search(place(KINDS[kind][2]), done.output[: raised.start()]), done.output


@pytest.mark.parametrize("kind", [pytest.param("hook"), *(pytest.param(k, marks=pytest.mark.slow) for k in TORCHRUN)])
def test_torchrun_names_the_culprit_as_the_root_cause(kind: str, tmp_path: Path) -> None:
    check_torchrun(kind, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("kind", ["hook", *TORCHRUN])
def test_torchrun_names_the_culprit_in_ten_launches_of_ten(kind: str, tmp_path: Path) -> None:
    for _ in range(10):
        check_torchrun(kind, tmp_path)

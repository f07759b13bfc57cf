"""Which failure is called the first one, decided from plain data."""

import json
import os
from pathlib import Path

import pytest

from accel.launch.failure import Exit, Failure, failed_at, in_order, read_failure, report


def ended(rank: int, status: int, at: float = 100.0, *, stopped: bool = False) -> Exit:
    return Exit(rank, 1000 + rank, status, at, stopped)


def error_file(folder: Path, *, seconds: float | None = None, message: object = None) -> Path:
    path = folder / "error.json"
    extra = {"py_callstack": "Traceback: boom", "timestamp": "99"} | ({} if seconds is None else {"seconds": seconds})
    path.write_text(json.dumps({"message": message or {"message": "ValueError: boom", "extraInfo": extra}}))
    return path


def test_a_success_and_a_process_that_was_stopped_are_no_failures(tmp_path: Path) -> None:
    assert read_failure(ended(0, 0), tmp_path / "none") is None
    assert read_failure(ended(0, -15, stopped=True), tmp_path / "none") is None


def test_a_success_stays_one_whatever_a_child_of_it_has_written(tmp_path: Path) -> None:
    assert read_failure(ended(0, 0), error_file(tmp_path, seconds=99.5)) is None


def test_only_the_process_itself_speaks_for_its_coming_end(tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    path.write_text(json.dumps({"message": {"message": "x", "extraInfo": {"seconds": 3.5, "pid": 7}}}))
    assert failed_at(path, 7) == 3.5
    assert failed_at(path, 8) is None
    assert failed_at(error_file(tmp_path), 7) is None
    assert failed_at(tmp_path / "none", 7) is None


def test_a_process_that_failed_and_was_then_stopped_is_a_failure(tmp_path: Path) -> None:
    failure = read_failure(ended(0, -15, stopped=True), error_file(tmp_path, seconds=99.5))
    assert failure is not None
    assert (failure.at, failure.summary, failure.status) == (99.5, "ValueError: boom", 1)


def test_the_time_of_the_error_counts_and_not_that_of_the_end(tmp_path: Path) -> None:
    slow = read_failure(ended(1, 1, at=105.0), error_file(tmp_path, seconds=99.0))
    assert slow is not None
    assert in_order([Failure(ended(0, 1), 100.0), slow])[0].exit.rank == 1


def test_a_file_that_torch_wrote_is_read_too(tmp_path: Path) -> None:
    path = error_file(tmp_path)
    os.utime(path, (98.25, 98.25))
    failure = read_failure(ended(0, 1), path)
    assert failure is not None
    assert (failure.at, failure.trace) == (98.25, "Traceback: boom")


@pytest.mark.parametrize("content", ["", "[]", "{", '{"message": "only words"}', "{}"])
def test_a_torn_or_foreign_error_file_hides_no_failure(content: str, tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    path.write_text(content)
    failure = read_failure(ended(0, 3), path)
    assert failure is not None
    assert failure.status == 3


def test_a_killed_process_comes_before_errors_that_its_peers_had_meanwhile() -> None:
    assert in_order([Failure(ended(0, 1), 100.0), Failure(ended(1, -9), 100.01)])[0].exit.rank == 1


def test_an_abort_stays_behind_the_error_that_led_to_it() -> None:
    assert in_order([Failure(ended(0, -6), 100.01), Failure(ended(1, 1), 100.0)])[0].exit.rank == 1


@pytest.mark.parametrize(
    ("status", "shown", "words"), [(3, 3, "exit status 3"), (-9, 137, "SIGKILL"), (-60, 188, "signal 60")]
)
def test_statuses_are_those_of_a_shell(status: int, shown: int, words: str) -> None:
    failure = Failure(ended(0, status), 1.0)
    assert failure.status == shown
    assert words in failure.ending


def test_the_first_failure_is_told_last_and_its_trace_ends_the_report() -> None:
    first = Failure(ended(1, 1), 1.0, "ValueError: boom", "Traceback\nValueError: boom\n")
    text = report([first, Failure(ended(0, 1), 2.0, "RuntimeError: lost")], 2)
    assert text.endswith("Traceback\nValueError: boom")
    assert text.count("ValueError: boom") == 1
    assert text.index("rank 0 then failed too") < text.index("rank 1 of 2 failed first")

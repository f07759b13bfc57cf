"""Which failure is called the first one, decided from plain data."""

import json
import os
from pathlib import Path

import pytest

from accel_launch.launch.supervisor.failure import Exit, Failure, failed_at, in_order, read_end, read_failure, report
from accel_state.errors import is_relayed


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


def test_an_error_that_only_repeats_another_ranks_is_never_first_however_early_it_was() -> None:
    relayed = Failure(ended(1, 1), 1.0, "CollectiveError: process 0 failed", "trace of 1", relayed=True)
    assert in_order([relayed, Failure(ended(0, 1), 9.0, "KeyError")])[0].exit.rank == 0
    assert in_order([relayed])[0].exit.rank == 1
    assert "rank 1 of 2 failed because of another rank" in report([relayed], 2)


def test_an_error_that_is_its_own_cause_repeats_no_other() -> None:
    error = RuntimeError("boom")
    error.__cause__ = error
    assert not is_relayed(error)
    error.__cause__ = RuntimeError("connection closed by peer")
    error.__cause__.__cause__ = error
    assert is_relayed(error)


def test_a_rank_that_ended_well_is_the_cause_only_of_errors_that_repeat_its_end(tmp_path: Path) -> None:
    path = error_file(tmp_path, seconds=99.0)
    left = read_end(ended(1, 0), path)
    assert left is not None
    lost = Failure(ended(0, 1), 99.5, "RuntimeError: closed by peer", "its trace", relayed=True)
    assert in_order([lost], [left])[0].exit.rank == 1
    assert in_order([Failure(ended(0, 1), 99.5, "KeyError")], [left])[0].exit.rank == 0
    assert in_order([], [left]) == []
    assert read_end(ended(1, 0, stopped=True), path) is None


def test_a_rank_that_was_killed_is_reported_with_the_words_of_a_peer() -> None:
    lost = Failure(ended(0, 1), 99.5, "RuntimeError: closed by peer", "rank 1 was last seen at a.py:3", relayed=True)
    text = report(in_order([lost, Failure(ended(1, -9), 99.6)]), 2)
    assert text.startswith("accel launch: rank 1 of 2 failed first")
    assert text.endswith("a.py:3")


def test_the_first_failure_begins_the_report_and_its_trace_ends_it() -> None:
    first = Failure(ended(1, 1), 1.0, "ValueError: boom", "Traceback\nValueError: boom\n")
    text = report([first, Failure(ended(0, 1), 2.0, "RuntimeError: lost")], 2)
    assert text.endswith("Traceback\nValueError: boom")
    assert text.count("ValueError: boom") == 1
    assert text.index("rank 1 of 2 failed first") < text.index("rank 0 then failed too")


def test_an_error_that_names_another_rank_is_in_the_first_line_too() -> None:
    lost = Failure(ended(0, 1), 1.0, "CollectiveError: rank 1 will not come to gather()", "its trace", relayed=True)
    head = report([lost], 2).splitlines()[0]
    assert head.startswith("accel launch: rank 0 of 2 failed because of another rank")
    assert head.endswith("rank 1 will not come to gather()")

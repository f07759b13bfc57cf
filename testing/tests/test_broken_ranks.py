"""Failures in a rank are reported with their line and the rank, and do not stop the tests after them."""

import os
import re
import sys
from pathlib import Path

import pytest

from accel_testing.programs.runs import Finished, run_command

BROKEN = Path(__file__).with_name("broken_ranks.py")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """One pytest run over the failing tests."""
    command = [sys.executable, "-m", "pytest", str(BROKEN), "-rA", "--import-mode=importlib", "-p", "no:cacheprovider"]
    return run_command(
        [*command, "-c", os.devnull, "--rootdir", str(BROKEN.parent), "--require=multigpu"],
        cwd=tmp_path_factory.mktemp("run"),
        env={"COLUMNS": "200"},
        timeout=120,
    )


@pytest.fixture(scope="module")
def run(finished: Finished) -> str:
    """What it printed."""
    return finished.output


def section(run: str, test: str) -> str:
    """What the run says about one failing test."""
    found = re.search(
        rf"^_+ (?:ERROR at \w+ of )?(?:TestUnit\.)?{test} _+$(.*?)(?=^(?:_+ [\w. ]+ _+|=+ .* =+)$)", run, re.M | re.S
    )
    assert found, f"{test} did not fail:\n{run[-6000:]}"
    return found[1]


def outcome(run: str, test: str) -> str:
    found = re.search(rf"^(\w+) \S*::{test}\b.*$|^(SKIPPED) .*{test}.*$", run, re.M)
    assert found, run[-6000:]
    return found[0]


@pytest.mark.slow
def test_assert_keeps_its_values(run: str) -> None:
    text = section(run, "test_assert_shows_values")
    assert "> " in text
    assert re.search(r"E +AssertionError: assert {'loss': 1.5, 'rank': 1} == {'loss': 1.5, 'rank': 0}", text)
    assert "on rank 1" in text
    assert "printed by 0" in text
    assert "printed by 1" in text
    assert "accel_testing/" not in text


def test_exception_of_first_failing_rank_is_shown(run: str) -> None:
    text = section(run, "test_exception_wakes_who_waits")
    assert "OwnError: code 41" in text
    assert "on rank 1" in text
    assert "rank 0 failed later" in text
    assert "OwnError: code 41 (rank 1)" in outcome(run, "test_exception_wakes_who_waits")


def test_hang_names_rank_and_line(run: str) -> None:
    text = section(run, "test_hang")
    line = BROKEN.read_text().split("# the line that hangs")[0].count("\n") + 1
    assert re.search(
        rf"rank 1 did not answer in \d+ s; it stands at {re.escape(str(BROKEN))}:{line} in test_hang", text
    )
    assert "inside all_reduce" in text
    assert "--- stacks of rank 0 ---" in text


def test_stopped_rank_is_recognised(run: str) -> None:
    assert re.search(r"rank 1 did not answer in \d+ s \(the process is stopped", section(run, "test_stopped"))


def test_dead_rank_is_named_with_its_signal(run: str) -> None:
    assert section(run, "test_killed").lstrip().startswith("rank 1 was killed by SIGKILL (9)")


def test_dead_rank_is_named_with_its_status_and_output(run: str) -> None:
    text = section(run, "test_exits")
    assert "rank 0 ended with exit status 17" in text
    assert "last words" in text


@pytest.mark.parametrize("test", ["test_ranks_live_again", "test_warning_filters_reach_ranks"])
def test_ranks_are_replaced(run: str, test: str) -> None:
    assert outcome(run, test).startswith("PASSED")


def test_skip_is_carried(run: str) -> None:
    assert "not on a Sunday" in run
    assert "SKIPPED [1] broken_ranks.py" in run or re.search(r"SKIPPED \[1\].*not on a Sunday", run)


def test_skip_of_one_rank_is_refused(run: str) -> None:
    assert "rank 0 skipped (only me), the others passed" in section(run, "test_skips_on_one_rank")


@pytest.mark.parametrize("test", ["test_xfails", "test_xfail_by_type"])
def test_xfail_is_carried(run: str, test: str) -> None:
    assert outcome(run, test).startswith("XFAIL")


def test_left_variable_is_named(run: str) -> None:
    assert "on rank 1: environment variable LEFT_BY_TEST is 'here'" in section(run, "test_leaves_variable")


def test_left_group_is_named(run: str) -> None:
    assert "on ranks 0, 1: the default process group is still open (gloo, 2 ranks)" in section(run, "test_leaves_group")


def test_left_thread_and_child_are_named(run: str) -> None:
    text = section(run, "test_leaves_thread_and_child")
    assert "on rank 0: thread sleeper" in text
    assert "on rank 0: child process" in text
    assert "rank 1" not in text


def test_leak_in_this_process_is_named(run: str) -> None:
    text = section(run, "test_leaves_variable_in_this_process")
    assert "environment variable LEFT_HERE is 'here'" in text


def test_argument_that_cannot_travel_is_named(run: str) -> None:
    assert "argument 'capsys' is a CaptureFixture" in section(run, "test_fixture_that_cannot_travel")


def test_examples_that_differ_between_ranks_are_refused(run: str) -> None:
    assert "every rank would draw other examples" in section(run, "test_random_examples")


def test_coroutines_are_refused(run: str) -> None:
    assert "runs plain functions" in section(run, "test_coroutine")


def test_zero_ranks_are_refused(run: str) -> None:
    assert "the number of ranks is a whole number of at least 1" in section(run, "test_zero_ranks")


def test_unittest_is_refused(run: str) -> None:
    assert "not on a TestCaseFunction" in section(run, "test_unittest")


def test_missing_device_is_a_skip_with_reason(run: str) -> None:
    assert re.search(r"SKIPPED.*needs a TPU", run)


def test_required_device_is_a_failure(run: str) -> None:
    assert "--require=multigpu: needs 64 accelerators" in section(run, "test_needs_64")


def test_nothing_stays_behind(finished: Finished) -> None:
    """The run killed, stopped and abandoned ranks, and none of them is there any more."""
    assert not finished.timed_out
    assert not finished.orphans

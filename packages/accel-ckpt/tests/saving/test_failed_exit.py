"""A process whose last background save failed, and that nobody told, ends with a status other than 0."""

import sys
from pathlib import Path

import pytest

from accel_ckpt.saving.failed_exit import STATUS
from accel_testing import Finished, run_command

SCRIPT = """
import atexit, logging, os, sys, weakref
import torch
from accel_ckpt.saving import transaction as saving; from accel_ckpt import AsyncSaver

class Kept: pass
kept = Kept()
atexit.register(print, "registered before")
weakref.finalize(kept, print, "finalized")
def fail(self, *_):
    raise OSError("the disk is on fire")
if {fails}:
    saving.SaveTransaction._write = fail
saver = AsyncSaver()
saver.save({path!r}, {{"w": torch.ones(3)}})
atexit.register(print, "registered after")
{end}
"""


def run(tmp_path: Path, end: str, *, fails: bool = True) -> Finished:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(path=str(tmp_path / "one"), end=end, fails=fails))
    return run_command([sys.executable, str(script)])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("end", ["", "sys.exit(0)", "sys.exit(3)", "del saver"])
def test_a_failure_that_nobody_was_told_of_ends_the_process_badly(tmp_path: Path, end: str) -> None:
    done = run(tmp_path, end)
    assert done.status == STATUS, done.output
    assert "the disk is on fire; no checkpoint was committed; the process ends with status 120" in done.output
    for line in ("registered before", "registered after", "finalized"):  # nothing of the end is skipped
        assert line in done.output
    assert not (tmp_path / "one").exists()


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("end", "status", "words"),
    [
        ("raise KeyError('mine')", 1, "KeyError: 'mine'"),
        ("try: saver.wait()\nexcept Exception as error: sys.exit(4)", 4, "the disk is on fire"),
        ("try: saver.close()\nexcept Exception as error: pass", 0, "the disk is on fire"),
    ],
)
def test_exceptions_and_failures_that_were_told_keep_their_status(
    tmp_path: Path, end: str, status: int, words: str
) -> None:
    done = run(tmp_path, end)
    assert (done.status, words in done.output) == (status, True), done.output


def test_a_child_that_is_forked_after_the_failure_keeps_its_status(tmp_path: Path) -> None:
    end = """
saver._running.exception()
if not (child := os.fork()): sys.exit(0)
print("the child ended with", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    done = run(tmp_path, end)
    assert "the child ended with 0" in done.output
    assert done.status == STATUS, done.output


def test_a_save_that_succeeds_changes_no_status(tmp_path: Path) -> None:
    done = run(tmp_path, "", fails=False)
    lines = sorted(done.check().output.splitlines())
    assert lines == ["finalized", "registered after", "registered before"]
    assert (tmp_path / "one" / "manifest.json").exists()

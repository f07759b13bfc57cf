"""Lines that the hang watchdog prints: none after success, none of torch's C++ stacks in its reports."""

import re
from pathlib import Path

import pytest

from accel_testing.programs.runs import run_script

QUIET = """
import os, signal, sys, time
from pathlib import Path
import torch
from accel import Accelerator

def pulses(number):
    beats = set()
    while len(beats) <= number:
        beats.add(watchdog.record.read().beat)
        time.sleep(0.01)

how, other = sys.argv[1], Path("pid")
accelerator = Accelerator(cpu=True)
watchdog = accelerator.session.lease.watchdog
watchdog._informed.wait()
accelerator.gather(torch.ones(2))
if accelerator.process_index == 0:
    other.write_text(str(os.getpid()))
accelerator.wait_for_everyone()
if how == "kill":
    if accelerator.process_index == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    accelerator.wait_for_everyone()
if accelerator.process_index == 1:
    command = Path("/proc", other.read_text(), "cmdline")
    while command.exists() and command.read_text():
        time.sleep(0.02)
    pulses(3)
if how == "end":
    accelerator.end_training()
"""
_OF_TORCH = re.compile(r"frame #\d|recvValue|sendBytes|Exception raised from")


@pytest.mark.parametrize("how", ["end", pytest.param("drop", marks=pytest.mark.slow)])
@pytest.mark.parametrize("apart", [pytest.param(False, marks=pytest.mark.slow), True], ids=["together", "apart"])
def test_a_run_that_succeeds_prints_nothing_of_ours(tmp_path: Path, how: str, apart: bool) -> None:
    (tmp_path / "train.py").write_text(_apart(QUIET) if apart else QUIET)
    assert run_script(tmp_path / "train.py", how, ranks=2, cwd=tmp_path).check().output == ""


@pytest.mark.parametrize("apart", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["together", "apart"])
def test_a_report_has_no_stacks_of_the_store(tmp_path: Path, apart: bool) -> None:
    (tmp_path / "train.py").write_text(_apart(QUIET) if apart else QUIET)
    said = run_script(tmp_path / "train.py", "kill", ranks=2, cwd=tmp_path, timeout=60).outputs[1]
    assert "rank 0 will not come to wait_for_everyone" in said or "rank 0 has not been heard of" in said, said
    assert not _OF_TORCH.search(said), said


def _apart(script: str) -> str:
    """The same with ranks that take each other for another machine's, as they would in two containers."""
    name = "import socket, os; socket.gethostname = lambda: 'machine' + os.environ['RANK']\n"
    return name + script

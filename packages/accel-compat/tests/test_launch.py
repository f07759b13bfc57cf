"""``accel launch --compat`` and torchrun: the program's ``import accelerate`` is accel in every process."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import json, sys
from accelerate import Accelerator
from accelerate.utils import gather_object
accelerator = Accelerator(cpu=True)
ranks = gather_object([accelerator.process_index])
if accelerator.is_main_process:
    print(json.dumps([ranks, "accel_compat" in sys.modules, __name__, sys.argv[1:]]))
"""
OF_ACCEL = 'true, "__main__", ["--lr", "1"]]\n'


def launch(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "accel", "launch", "--compat", "--cpu", *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=280)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("program", [["script.py"], ["-m", "script"]], ids=["script", "module"])
@pytest.mark.parametrize(("processes", "ranks"), [("1", "[0]"), ("2", "[0, 1]")])
def test_every_process_resolves_accelerate_to_accel(tmp_path, program, processes, ranks):
    (tmp_path / "script.py").write_text(SCRIPT)
    done = launch(tmp_path, "--num_processes", processes, *program, "--lr", "1")
    assert (done.returncode, done.stdout) == (0, f"[{ranks}, {OF_ACCEL}"), done.stderr


@pytest.mark.slow
def test_torchrun_starts_the_ranks(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command = [*torchrun, "-m", "accel.compat", "script.py", "--lr", "1"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=280)
    assert (done.returncode, done.stdout) == (0, f"[[0, 1], {OF_ACCEL}"), done.stderr


def test_the_program_has_to_be_python(tmp_path):
    done = launch(tmp_path, "--no_python", "ls")
    assert done.returncode == 2
    assert "compat and no_python are both set" in done.stderr

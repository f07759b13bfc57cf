"""``accel check`` is a command of accel-testing: it runs a script's program under layouts, and its status says how."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from accel_launch.cli.app import run

SCRIPT = """
import torch
from torch import nn
from accel_testing import Program

def program():
    data = torch.randn(2, 8, 4)
    return Program(nn.Linear(4, 1), lambda model, batch: model(batch).square().mean(), list(data))
"""


# The last layout takes four ranks.
LAYOUTS = {
    "ddp:2/fp64": "ddp:2/fp64",
    "fsdp:2/fp64/acc=2": "fsdp:2/fp64/acc=2",
    "hsdp:2x2/fp64": "fsdp:4/fp64/dp_replicate=2/dp_shard=2",
}


@pytest.mark.parametrize("number", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_program_is_checked_under_its_layouts(tmp_path: Path, number: int) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    layouts = list(LAYOUTS.values())[:number]
    asked = ",".join(list(LAYOUTS)[:number])
    done = subprocess.run(
        [sys.executable, "-m", "accel", "check", "train.py:program", "--layouts", asked, "--json"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["ok"], found["steps"]) == (True, 2)
    assert [layout["layout"] for layout in found["layouts"]] == layouts
    assert all(layout["departure"] is None and layout["distance"] <= layout["tolerance"] for layout in found["layouts"])


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], "Missing argument 'SCRIPT.py:FUNCTION'"),
        (["train.py"], "expected SCRIPT.py:FUNCTION"),
        (["train.py:program"], "there is no file train.py"),
        (["train.py:program", "--layout", "ddp:2"], "unknown option --layout; did you mean --layouts?"),
    ],
)
def test_a_check_that_cannot_be_run_says_why(
    argv: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["check", *argv]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.slow
def test_a_misspelt_function_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("def program():\n    return 3\n")
    assert run(["check", "train.py:progam"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("has no function 'progam'; did you mean 'program'?")


def test_a_misspelt_backend_of_a_layout_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)
    assert run(["check", "train.py:program", "--layouts", "ddp:2,dpp:2/fp64"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "layout 'dpp:2/fp64': no backend 'dpp'; did you mean 'ddp'? there are: ddp, " in line

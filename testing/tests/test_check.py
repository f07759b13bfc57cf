"""A user's own script is checked by the name of its function, without being imported here."""

import re
import sys
from pathlib import Path

import pytest

from accel_testing.equivalence.equivalence import run_check
from accel_testing.errors import RankError
from accel_testing.programs.runs import run_command
from accel_testing.ranks.pool import RankPool

SCRIPT = """
import torch
from torch import nn
from helper_of_script import WIDTH
from accel_testing import Program

def good():
    x = torch.randn(3, 8, WIDTH)
    model = nn.Linear(WIDTH, 1)
    return Program(model, lambda model, batch: model(batch).square().mean(), list(x))

def dropout():
    program = good()
    model = nn.Sequential(nn.Dropout(0.5), program.model)
    return Program(model, program.loss, program.batches)

def nothing():
    return None
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "helper_of_script.py").write_text("WIDTH = 4\n")
    path = tmp_path / "script_to_check.py"
    path.write_text(SCRIPT)
    return path


def test_checks_tell_good_from_bad(script: Path, rank_pool: RankPool) -> None:
    report = run_check(f"{script}:good", ["ddp:2", "ddp:2/acc=2"], precisions=["fp64"], pool=rank_pool)
    assert report.ok, str(report)
    assert report.steps == 3
    assert "script_to_check" not in sys.modules
    assert re.search(r"ddp:2/fp64/acc=2 +\S+ +1e-10  ok", str(report))


def test_randomness_of_a_model_is_a_difference(script: Path, rank_pool: RankPool) -> None:
    report = run_check(f"{script}:dropout", "ddp:2", precisions=["fp32"], pool=rank_pool)
    assert not report.ok
    assert "leaves the one-process reference at step 0" in str(report)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("goood", "has no function 'goood'; did you mean 'good'?"),
        ("nothing", "returned a NoneType; expected a Program"),
    ],
)
def test_function_that_makes_no_program_is_named(script: Path, rank_pool: RankPool, function: str, words: str) -> None:
    with pytest.raises(RankError, match=re.escape(words)):
        run_check(f"{script}:{function}", precisions=["fp64"], pool=rank_pool)


@pytest.mark.parametrize(
    ("target", "words"), [("train.py", "expected SCRIPT.py:FUNCTION"), ("no/such.py:f", "there is no file no/such.py")]
)
def test_target_that_cannot_be_read_is_refused(target: str, words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        run_check(target)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        pytest.param(["good", "--layouts", "ddp:2/fp64"], 0, "ddp:2/fp64", marks=pytest.mark.slow),
        (["dropout", "--layouts", "single/fp64,ddp:2/fp64"], 1, "DIFFERENT"),
        (["good", "--layouts", "ddp:2/fp46"], 2, "did you mean 'fp64'?"),
        (["good", "another.py:good"], 2, "unexpected extra argument (another.py:good)"),
    ],
)
def test_command_ends_with_what_it_found(script: Path, arguments: list[str], status: int, words: str) -> None:
    function, *rest = arguments
    done = run_command([sys.executable, "-m", "accel_testing", f"{script}:{function}", *rest])
    assert done.status == status, done.output
    assert words in done.output
    assert not done.orphans


def test_command_explains_itself() -> None:
    done = run_command([sys.executable, "-m", "accel_testing", "--help"]).check()
    assert "SCRIPT.py:FUNCTION" in done.output
    assert "--layouts" in done.output

"""The demo does what it says, in small: it is killed, resumes, and repeats its steps to the last bit."""

import json
import math
import sys
from pathlib import Path

import pytest

from accel_testing.programs.runs import run_command

RUN = Path(__file__).parents[1] / "demo" / "run.py"
STEPS = 80  # with 20 between two checkpoints, a kill hardly falls just behind one


@pytest.mark.fault
def test_the_demo_is_killed_and_resumes_without_a_trace(tmp_path: Path) -> None:
    small = ["--steps", str(STEPS), "--num_processes", "2", "--", "--width", "32", "--layers", "1", "--context", "32"]
    command = [sys.executable, RUN, "--folder", tmp_path / "demo", *small]
    finished = run_command(command, cwd=tmp_path, env={"ACCEL_CPU": "true"}, timeout=240).check()

    assert "killed by SIGKILL" in finished.output
    assert "resuming from" in finished.output
    assert "0.0e+00" in finished.output, "the largest difference of a repeated step"

    folder = tmp_path / "demo"
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    losses: dict[int, set[float]] = {}
    for row in rows:
        losses.setdefault(row["step"], set()).add(row["loss"])
    assert sorted(losses) == list(range(1, STEPS + 1))
    assert len({row["pid"] for row in rows}) == 2
    assert len(rows) > STEPS, "no step was trained twice"
    assert all(len(values) == 1 for values in losses.values()), losses

    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    result = json.loads((folder / "result.json").read_text())
    numbers = {name: value for name, value in result.items() if isinstance(value, float | int)}
    assert {"held_out_loss", "bigram_loss", "parameters", "tokens", "seconds"} <= numbers.keys()
    assert all(math.isfinite(value) for value in numbers.values())
    assert (result["steps"], result["processes"]) == (STEPS, 2)

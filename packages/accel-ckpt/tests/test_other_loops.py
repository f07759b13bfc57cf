"""The layer works in loops that are not ours. ``ci/check_wheels.py`` runs the same from built wheels."""

import sys
from pathlib import Path

from accel_testing.programs.runs import run_command

SCRIPT = Path(__file__).parent / "other_loops.py"


def test_a_loop_goes_on_sharded_and_full_by_turns() -> None:
    done = run_command([sys.executable, SCRIPT], timeout=250).check()
    assert "on 1 -> 2 -> 1 -> 2 processes: weights and moments as if never stopped" in done.output

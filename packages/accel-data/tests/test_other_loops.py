"""The layer works in loops that are not ours. ``ci/check_wheels.py`` runs the same from built wheels."""

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from accel_testing.programs.runs import run_command

SCRIPT = Path(__file__).parent / "other_loops.py"


@pytest.mark.parametrize("kind", ["torch", pytest.param("fabric", marks=pytest.mark.slow)])
def test_a_loop_stopped_inside_an_epoch_goes_on_with_another_number_of_processes(kind):
    if kind == "fabric" and find_spec("lightning_fabric") is None:
        pytest.skip("lightning-fabric is not installed")
    done = run_command([sys.executable, str(SCRIPT), kind], timeout=250).check()
    assert f"{kind}: 24 + 36 + 43 samples, each once; weights as if never stopped" in done.output

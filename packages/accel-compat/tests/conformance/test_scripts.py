"""The tests that Accelerate's distribution has inside run on accel, in one process and in two.

Left out are scripts that fail with Accelerate itself on a machine without accelerators.
"""

import pytest

pytestmark = pytest.mark.timeout(900)
SCRIPTS = {
    "test_cli": (1, 2),
    "test_merge_weights": (1,),
    "test_ops": (1, 2),
    "test_script": (1, 2),
    "test_sync": (1, 2),
}


@pytest.mark.parametrize(("script", "processes"), [(name, one) for name, counts in SCRIPTS.items() for one in counts])
def test_a_script_passes(launched, script, processes):
    launched(processes, "-m", f"accelerate.test_utils.scripts.{script}")


@pytest.mark.slow
@pytest.mark.parametrize("script", ["test_ops", "test_sync"])
def test_a_script_passes_in_three_processes(launched, script):
    launched(3, "-m", f"accelerate.test_utils.scripts.{script}")

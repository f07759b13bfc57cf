"""The package's face: lazy, complete, and cheap."""

import subprocess
import sys

import pytest

import accel_state


@pytest.mark.parametrize("name", accel_state.__all__)
def test_every_public_name_resolves(name):
    assert hasattr(accel_state, name)


def test_unknown_names_are_attribute_errors():
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = accel_state.no_such_name


def test_names_are_listed_in_order_and_once():
    assert sorted(set(accel_state.__all__)) == accel_state.__all__
    assert dir(accel_state) == accel_state.__all__


def test_importing_loads_no_torch():
    code = "import sys, accel_state; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_opening_one_process_loads_nothing_heavy():
    code = (
        "import sys, torch\n"
        "before = set(sys.modules)\n"
        "import accel_state\n"
        "accel_state.Session, accel_state.gather, accel_state.ParallelismConfig, accel_state.get_logger\n"
        "new = set(sys.modules) - before\n"
        "slow = ('torch.distributed.', 'torch._dynamo', 'importlib.metadata')\n"
        "heavy = {name for name in new if name.startswith(slow)}\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)

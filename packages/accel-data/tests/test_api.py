import subprocess
import sys

import pytest

import accel_data


@pytest.mark.parametrize("name", accel_data.__all__)
def test_every_public_name_is_there_and_says_what_it_is(name):
    found = getattr(accel_data, name)
    assert name in ("__version__", "ShardFunction") or found.__doc__


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = accel_data.nothing


def test_importing_loads_nothing_but_how_names_are_found():
    code = (
        "import sys, torch; before = set(sys.modules); import accel_data;"
        "print(sorted(name for name in set(sys.modules) - before if not name.endswith('._version')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == str(["accel_data", "accel_state", "accel_state.lazy"])

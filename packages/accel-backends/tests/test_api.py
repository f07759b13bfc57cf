import subprocess
import sys

import pytest

import accel_backends


@pytest.mark.parametrize("name", accel_backends.__all__)
def test_every_public_name_is_there_and_says_what_it_is(name):
    found = getattr(accel_backends, name)
    assert name == "__version__" or found.__doc__


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = accel_backends.nothing


def test_importing_loads_nothing_heavy():
    code = (
        "import sys, torch; before = set(sys.modules); import accel_backends;"
        "light = {'accel_state', 'accel_state._version', 'accel_state.lazy'};"
        "print([name for name in set(sys.modules) - before - light if not name.startswith('accel_backends')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"

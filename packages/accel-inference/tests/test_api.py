"""Every public name can be imported, and importing the package brings in nothing heavy."""

import subprocess
import sys

import pytest

import accel_inference


@pytest.mark.parametrize("name", accel_inference.__all__)
def test_every_public_name_is_there(name):
    assert hasattr(accel_inference, name)


def test_importing_brings_in_no_torch():
    code = "import sys, accel_inference; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"

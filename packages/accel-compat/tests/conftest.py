"""``import accelerate`` is accel in the tests of this package, and each test begins without a state."""

from collections.abc import Iterator

import pytest

import accel_compat
from accel_compat.state.accelerator_state import SharedAcceleratorState
from accel_compat.state.gradient_state import SharedGradientState


@pytest.fixture(autouse=True)
def accelerate() -> Iterator[None]:
    accel_compat.install()
    yield
    SharedAcceleratorState._reset_state(reset_partial_state=True)
    SharedGradientState._reset_state()
    accel_compat.uninstall()

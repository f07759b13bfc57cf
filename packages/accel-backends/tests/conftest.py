import pytest

from accel_precision import PrecisionPolicy
from accel_state import Session


@pytest.fixture
def session():
    with Session.open(device="cpu", env={}) as opened:
        yield opened


@pytest.fixture
def single(session):
    """Makes a backend for one CPU process with the precision of the given name."""
    from accel_backends import Run, SingleBackend

    def make(precision="no", **options):
        return SingleBackend(Run(session, PrecisionPolicy.parse(precision, device_type="cpu"), **options))

    return make

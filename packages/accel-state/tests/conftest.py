"""Settings that hold for all tests of accel-state."""

from hypothesis import settings

# Machines differ in speed, and other tests run at the same time.
settings.register_profile("accel", deadline=None, max_examples=60)
settings.load_profile("accel")

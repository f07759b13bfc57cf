"""Ranks, leaks, faults and equivalence for tests of distributed training code.

Names are imported on first use: the pytest plugin is loaded in every run, and must cost next to nothing there.
"""

from accel_state.lazy import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)

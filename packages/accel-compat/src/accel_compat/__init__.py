"""Accelerate's import paths and semantics over accel.

Names are imported on first use.
"""

from accel_state.lazy import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)

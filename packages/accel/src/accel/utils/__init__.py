"""Helpers under the names of ``accelerate.utils``; each is imported on first use."""

from accel_state.lazy import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__, advice="accel.absent")

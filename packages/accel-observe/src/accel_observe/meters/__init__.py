"""Meters of a run: its time by phase, its speed, and its health."""

from accel_state.lazy import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)

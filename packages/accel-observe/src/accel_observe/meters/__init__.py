"""Meters of a run: time by phase, throughput, and health of the loss."""

from accel_state.lazy import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)

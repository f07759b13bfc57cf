"""A run's own log as one page: what happened, how fast, and with which settings."""

from accel_state.lazy import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)

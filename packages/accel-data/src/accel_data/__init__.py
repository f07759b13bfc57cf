"""Sharded data loading that resumes at the next undelivered sample on any number of processes.

Names are imported on first use.
"""

from accel_state.lazy import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)

"""Checkpoints with an atomic commit, readable at any world size.

Names are imported on first use, so that ``import accel_ckpt`` is fast.
"""

from accel_state.lazy import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)

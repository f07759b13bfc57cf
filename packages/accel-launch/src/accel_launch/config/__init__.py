"""Resolved configuration with the origin of every value.

Names are imported on first use; no module here imports torch.
"""

from accel_state.lazy import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)

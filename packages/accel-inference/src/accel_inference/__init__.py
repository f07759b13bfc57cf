"""Models larger than memory: placement on devices, and offload with prefetching.

Names are imported on first use.
"""

from accel_state.lazy import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)

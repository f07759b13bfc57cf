"""One resolved configuration that knows where every value came from.

Names are imported on first use; nothing here imports torch.
"""

from accel_state.lazy import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)

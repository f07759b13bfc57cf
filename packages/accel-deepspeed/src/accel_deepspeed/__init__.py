"""DeepSpeed as a backend: ZeRO 0 to 3, offload, AutoTP and Ulysses with an ordinary training loop.

Names are imported on first use; DeepSpeed itself is imported when an engine is created.
"""

from accel_state.lazy import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)

"""Megatron-LM as a backend: tensor, sequence and pipeline parallelism with an ordinary training loop.

Names are imported on first use; megatron-core itself is imported when the backend is opened.
"""

from accel_state.lazy import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)

"""Accelerator: one object around a PyTorch training loop, from one CPU to a cluster.

    from accel import Accelerator

Names are imported on first use, so that ``import accel`` is fast and touches no device.
"""

from accel_state.lazy import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__, advice="accel.absent")

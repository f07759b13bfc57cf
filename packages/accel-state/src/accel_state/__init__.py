"""Topology, device, process group and collectives of a process of a run.

Names are imported on first use, so that ``import accel_state`` costs next to nothing and touches no device.
"""

from accel_state.lazy import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)

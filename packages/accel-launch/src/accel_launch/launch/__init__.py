"""Start of a job's processes: a plan that can be printed, and its execution.

Names are imported on first use; torch is imported only for a rendezvous of several machines.
"""

from accel_state.lazy import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)

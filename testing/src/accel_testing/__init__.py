"""Test harness for distributed training code: ranks, leak checks, faults and equivalence.

Names are imported on first use: the pytest plugin is loaded in every pytest run and must be cheap there.
"""

from accel_state.lazy import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)

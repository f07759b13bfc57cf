"""Starting the processes of a job: a plan that can be printed, and the runner that carries it out.

Names are imported on first use; torch is imported only where several machines have to find each other.
"""

from accel_state.lazy import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)

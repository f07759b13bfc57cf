"""Report of a run from its run log, as one page: events, throughput and settings."""

from accel_state.lazy import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)

"""Configuration, launcher, notebooks and the command line. Nothing here imports torch before it is needed."""

from accel_state.lazy import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)

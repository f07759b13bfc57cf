"""Configuration, launcher, notebook support and command line. Modules import torch only when they need it."""

from accel_state.lazy import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)

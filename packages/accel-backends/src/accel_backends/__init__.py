"""Backends: placement, synchronisation and optimizer steps of models on one device or many."""

from accel_state.lazy import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)

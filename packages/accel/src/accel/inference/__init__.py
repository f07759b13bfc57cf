"""Names of ``accelerate.inference``."""

from accel.inference.pipeline import prepare_pippy as prepare_pippy

__all__ = ["prepare_pippy"]

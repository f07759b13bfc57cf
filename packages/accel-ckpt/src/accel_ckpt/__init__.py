"""Checkpoints that are committed or not there, readable at any world size."""

from accel_ckpt._version import __version__ as __version__

"""Ranks, leaks, faults and equivalence for tests of distributed training code."""

from accel_testing._version import __version__ as __version__

"""Sharded data loading that resumes at the next undelivered sample on any number of processes."""

from accel_data._version import __version__ as __version__

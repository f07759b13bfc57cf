"""Dtypes by role, autocast, loss scaling and fp8 conversion."""

from accel_precision._version import __version__ as __version__

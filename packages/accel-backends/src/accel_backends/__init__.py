"""How a model is placed, synchronised and stepped."""

from accel_backends._version import __version__ as __version__

"""One object around your PyTorch training loop: from one CPU to a cluster."""

from accel._version import __version__ as __version__

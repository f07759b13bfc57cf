"""The ``accel check`` and ``accel test`` commands."""

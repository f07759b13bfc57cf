"""The ``accel ckpt`` commands."""

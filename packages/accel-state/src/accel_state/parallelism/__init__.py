"""Degrees of parallelism and the device mesh."""

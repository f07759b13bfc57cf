"""Degrees of parallelism, and the device mesh made of them."""

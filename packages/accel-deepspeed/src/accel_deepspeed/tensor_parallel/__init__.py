"""Tensor parallelism by AutoTP."""

"""Collectives over nested tensors and Python objects."""

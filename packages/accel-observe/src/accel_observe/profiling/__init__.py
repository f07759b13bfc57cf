"""Profiles of a run: operators, communication, and tensors at an out-of-memory error."""

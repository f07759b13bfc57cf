"""Sequence parallelism by Ulysses."""

"""Sequence parallelism with DeepSpeed-Ulysses."""

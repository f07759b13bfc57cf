"""The training loop: accumulation windows, micro-batches and metrics."""

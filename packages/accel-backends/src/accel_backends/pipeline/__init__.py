"""Backend of pipeline parallelism."""

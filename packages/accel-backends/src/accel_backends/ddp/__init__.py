"""Data parallelism by DistributedDataParallel."""

"""Fully sharded data parallelism (FSDP2)."""

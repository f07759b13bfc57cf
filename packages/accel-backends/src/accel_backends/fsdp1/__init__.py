"""Fully sharded data parallelism, version 1."""

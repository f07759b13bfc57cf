"""Explanation, profiling and memory snapshots of a run."""

"""``ParallelismConfig``, under its documented path."""

from accel_state.parallelism import ParallelismConfig as ParallelismConfig

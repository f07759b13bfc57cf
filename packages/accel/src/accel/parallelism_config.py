"""``ParallelismConfig``, under its documented path."""

from accel_state.parallelism.config import ParallelismConfig as ParallelismConfig

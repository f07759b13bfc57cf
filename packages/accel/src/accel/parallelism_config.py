"""``ParallelismConfig``, under Accelerate's import path."""

from accel_state.parallelism.config import ParallelismConfig as ParallelismConfig

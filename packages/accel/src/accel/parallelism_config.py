"""How many processes work together in which way, under its documented path."""

from accel_state.parallelism import ParallelismConfig as ParallelismConfig

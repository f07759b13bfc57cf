from accel.utils.dataclasses import ParallelismConfig as ParallelismConfig

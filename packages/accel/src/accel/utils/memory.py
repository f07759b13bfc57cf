"""Memory of devices and host."""

from accel_state.device.memory import clear_device_cache as clear_device_cache
from accel_state.device.memory import find_executable_batch_size as find_executable_batch_size
from accel_state.device.memory import release_memory as release_memory
from accel_state.device.memory import should_reduce_batch_size as should_reduce_batch_size

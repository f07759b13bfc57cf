from accel.utils.memory import clear_device_cache as clear_device_cache
from accel.utils.memory import find_executable_batch_size as find_executable_batch_size
from accel.utils.memory import release_memory as release_memory
from accel.utils.memory import should_reduce_batch_size as should_reduce_batch_size

from accel_compat.state.accelerator_state import SharedAcceleratorState as AcceleratorState
from accel.utils.dataclasses import DistributedType as DistributedType
from accel_compat.state.gradient_state import SharedGradientState as GradientState
from accel_compat.state.process_state import SharedPartialState as PartialState
from accel_compat.helpers.constants import SharedDict as SharedDict
from accel_compat.absent import ThreadLocalSharedDict as ThreadLocalSharedDict
from accel_compat.state.process_state import do_nothing as do_nothing
from accel_compat.state.accelerator_state import is_initialized as is_initialized

from accel.utils.random import set_seed as set_seed
from accel.utils.random import synchronize_rng_state as synchronize_rng_state
from accel.utils.random import synchronize_rng_states as synchronize_rng_states

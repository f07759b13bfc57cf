"""Seeds and random state."""

from accel_state.rng import set_seed as set_seed
from accel_state.rng import synchronize_rng_state as synchronize_rng_state
from accel_state.rng import synchronize_rng_states as synchronize_rng_states

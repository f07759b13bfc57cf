"""Functions that belong to no other module."""

from accel.state import wait_for_everyone as wait_for_everyone
from accel_backends.ops.compile import compile_regions as compile_regions
from accel_backends.ops.compile import unwrap as unwrap

extract_model_from_parallel = unwrap

"""Versions of installed libraries."""

from accel_state.versions import compare_versions as compare_versions
from accel_state.versions import is_torch_version as is_torch_version

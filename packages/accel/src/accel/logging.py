"""Loggers that include the rank."""

from accel_state.logging import MultiProcessAdapter as MultiProcessAdapter
from accel_state.logging import get_logger as get_logger

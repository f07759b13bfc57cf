"""Errors of planning."""

from accel_state.errors import AccelError


class PlanError(AccelError, ValueError):
    """The model cannot be profiled without a real run, or no candidate fits the hardware."""

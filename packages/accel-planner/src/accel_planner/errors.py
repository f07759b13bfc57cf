"""Errors of planning."""

from accel_state.errors import AccelError


class PlanError(AccelError, ValueError):
    """A model cannot be looked at without running it for real, or nothing fits the hardware."""

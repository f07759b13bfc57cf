"""Trackers, under Accelerate's import path."""

from typing import Any

import accel_observe.tracking
from accel_observe.tracking import *  # noqa: F403


def __getattr__(name: str) -> Any:
    return getattr(accel_observe.tracking, name)

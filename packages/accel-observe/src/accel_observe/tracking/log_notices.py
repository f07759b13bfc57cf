"""Warnings of accel, noted in the run's own log as well."""

import logging
from collections.abc import Callable
from typing import Any, final

PACKAGES = ("accel", "accel_state", "accel_precision", "accel_data", "accel_backends", "accel_ckpt", "py.warnings")
"""The loggers that are listened to; the last one speaks where ``logging.captureWarnings(True)`` was called."""
_TOLD_OTHERWISE = "accel_observe.meters"


@final
class Notices(logging.Handler):
    """Hands warnings on, without taking them from whoever else shows them."""

    def __init__(self, note: Callable[..., Any]) -> None:
        super().__init__(logging.WARNING)
        self._note = note

    def open(self) -> None:
        """Begins to listen."""
        for name in PACKAGES:
            logging.getLogger(name).addHandler(self)

    def close(self) -> None:
        """Stops listening."""
        for name in PACKAGES:
            logging.getLogger(name).removeHandler(self)
        super().close()

    def emit(self, record: logging.LogRecord) -> None:
        """Notes a warning."""
        if not record.name.startswith(_TOLD_OTHERWISE):
            self._note("warning", text=record.getMessage().strip(), source=record.name)
        # Python shows a warning on its own only while nobody listens; we do not count as somebody.
        if logging.lastResort is not None and _speaker(record.name) is self:
            logging.lastResort.handle(record)


def _speaker(name: str) -> logging.Handler | None:
    """Of the handlers that a record of this logger reaches the last of ours, if there are none but ours."""
    logger: logging.Logger | None = logging.getLogger(name)
    found: list[logging.Handler] = []
    while logger is not None:
        found += logger.handlers
        logger = logger.parent if logger.propagate else None
    return found[-1] if found and all(isinstance(one, Notices) for one in found) else None

"""Log handler that records accel's warnings in the run log."""

import logging
from collections.abc import Callable
from typing import Any, final

PACKAGES = ("accel", "accel_state", "accel_precision", "accel_data", "accel_backends", "accel_ckpt", "py.warnings")
"""Loggers whose warnings are recorded; the last one is used after ``logging.captureWarnings(True)``."""
_TOLD_OTHERWISE = "accel_observe.meters"


@final
class Notices(logging.Handler):
    """Log handler that records warnings and leaves their display to the other handlers."""

    def __init__(self, note: Callable[..., Any]) -> None:
        super().__init__(logging.WARNING)
        self._note = note

    def open(self) -> None:
        """Adds the handler to the loggers."""
        for name in PACKAGES:
            logging.getLogger(name).addHandler(self)

    def close(self) -> None:
        """Removes the handler from the loggers."""
        for name in PACKAGES:
            logging.getLogger(name).removeHandler(self)
        super().close()

    def emit(self, record: logging.LogRecord) -> None:
        """Records a warning."""
        if not record.name.startswith(_TOLD_OTHERWISE):
            self._note("warning", text=record.getMessage().strip(), source=record.name)
        # Python prints a warning itself only if a logger has no handlers; without this, our handler would suppress the
        # print.
        if logging.lastResort is not None and _speaker(record.name) is self:
            logging.lastResort.handle(record)


def _speaker(name: str) -> logging.Handler | None:
    """The last handler that a record of this logger reaches, if all handlers that it reaches are ``Notices``."""
    logger: logging.Logger | None = logging.getLogger(name)
    found: list[logging.Handler] = []
    while logger is not None:
        found += logger.handlers
        logger = logger.parent if logger.propagate else None
    return found[-1] if found and all(isinstance(one, Notices) for one in found) else None

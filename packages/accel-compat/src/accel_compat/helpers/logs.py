"""Loggers that know the processes."""

import functools
import logging
import os
from collections.abc import MutableMapping
from typing import Any

from accel_compat.state.process_state import SharedPartialState


class CompatLogAdapter(logging.LoggerAdapter[logging.Logger]):
    """A logger that logs on the main process, on all of them, or in order of rank."""

    @staticmethod
    def _should_log(main_process_only: bool) -> bool:
        return not main_process_only or SharedPartialState().is_main_process

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        """Logs on the main process; with ``main_process_only=False`` on all; with ``in_order`` on all, one by one.

        Raises:
            RuntimeError: no state of the process exists.
        """
        if SharedPartialState._shared_state == {}:
            raise RuntimeError(
                "You must initialize the accelerate state by calling either `PartialState()` or `Accelerator()` before "
                "using the logging utility."
            )
        main_process_only = kwargs.pop("main_process_only", True)
        in_order = kwargs.pop("in_order", False)
        kwargs.setdefault("stacklevel", 2)
        if not self.isEnabledFor(level):
            return
        text, options = self.process(msg, kwargs)
        if not in_order:
            if self._should_log(main_process_only):
                self.logger.log(level, text, *args, **options)
            return
        state = SharedPartialState()
        for rank in range(state.num_processes):
            if rank == state.process_index:
                self.logger.log(level, text, *args, **options)
            state.wait_for_everyone()

    def process(self, msg: object, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        """Adds the rank to the text."""
        return f"[RANK {SharedPartialState().process_index}] {msg}", kwargs

    @functools.lru_cache(None)  # noqa: B019  (each text once a process)
    def warning_once(self, *args: Any, **kwargs: Any) -> None:
        """Logs a warning, once for each text."""
        self.warning(*args, **kwargs)


def get_logger(name: str, log_level: str | None = None) -> CompatLogAdapter:
    """Returns a logger that knows the processes."""
    level = os.environ.get("ACCELERATE_LOG_LEVEL") if log_level is None else log_level
    logger = logging.getLogger(name)
    if level is not None:
        logger.setLevel(level.upper())
        logger.root.setLevel(level.upper())
    return CompatLogAdapter(logger, {})

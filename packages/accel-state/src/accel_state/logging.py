"""Loggers with the rank in each message, which log on the main rank, on all ranks, or rank by rank."""

import logging
import os
from collections.abc import MutableMapping
from typing import TYPE_CHECKING, Any, final

from accel_state.errors import SessionError

if TYPE_CHECKING:
    from accel_state.topology import Topology

_LEVEL_VARIABLES = ("ACCEL_LOG_LEVEL", "ACCELERATE_LOG_LEVEL")


def get_logger(name: str, log_level: str | int | None = None) -> "MultiProcessAdapter":
    """Returns a logger that logs on the main rank only, unless a call requests otherwise.

    ``log_level`` (or ``ACCEL_LOG_LEVEL``, ``ACCELERATE_LOG_LEVEL``) sets the level of this logger only. No session is
    needed: without a session the rank is read from the launcher's variables.
    """
    logger = logging.getLogger(name)
    level = log_level or next((os.environ[name] for name in _LEVEL_VARIABLES if os.environ.get(name)), None)
    if level is not None:
        logger.setLevel(level.upper() if isinstance(level, str) else level)
    return MultiProcessAdapter(logger, {})


if TYPE_CHECKING:
    _Adapter = logging.LoggerAdapter[logging.Logger]
else:
    _Adapter = logging.LoggerAdapter


@final
class MultiProcessAdapter(_Adapter):
    """A ``logging.LoggerAdapter`` whose methods also take ``main_process_only`` and ``in_order``.

    With several processes each message starts with ``[RANK i]``.
    """

    def __init__(self, logger: logging.Logger, extra: MutableMapping[str, object] | None = None) -> None:
        super().__init__(logger, extra)
        self._seen: set[object] = set()
        self._launched: Topology | None = None

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        """Logs on rank 0; on all ranks with ``main_process_only=False``; rank by rank with ``in_order=True``.

        Collective: every rank of the group must call this. That holds for ``in_order`` only, and then for disabled
        levels too.

        Raises:
            SessionError: ``in_order`` with several processes and no open session.
        """
        main_process_only = kwargs.pop("main_process_only", True)
        in_order = kwargs.pop("in_order", False)
        # Skips this frame; an adapter around this one adds its own frame.
        kwargs.setdefault("stacklevel", 2)
        if not in_order and not self.isEnabledFor(level):
            return
        here = self._topology()
        if not in_order or here.world_size == 1:
            if here.is_main or not main_process_only:
                self._emit(here, level, msg, args, kwargs)
            return
        from accel_state.session import Session

        session = Session.current()
        if session is None:
            raise SessionError(f"in_order=True among {here.world_size} processes needs an open session: Session.open()")
        for rank in range(here.world_size):
            if rank == here.rank:
                self._emit(here, level, msg, args, kwargs)
            session.wait_for_everyone()

    def warning_once(self, msg: object, *args: object, **kwargs: Any) -> None:
        """Logs a warning, but each distinct message only once per logger object."""
        key = (str(msg), tuple(str(arg) for arg in args))
        if key not in self._seen:
            self._seen.add(key)
            kwargs.setdefault("stacklevel", 3)
            self.warning(msg, *args, **kwargs)

    def _emit(
        self, here: "Topology", level: int, msg: object, args: tuple[object, ...], kwargs: dict[str, Any]
    ) -> None:
        if self.isEnabledFor(level):
            msg, kwargs = self.process(msg, kwargs)  # type: ignore[assignment]
            kwargs["stacklevel"] += 1
            self.logger.log(level, f"[RANK {here.rank}] {msg}" if here.world_size > 1 else msg, *args, **kwargs)

    def _topology(self) -> "Topology":
        from accel_state.session import Session, current_topology

        if Session.current() is not None:
            return current_topology()
        if self._launched is None:
            self._launched = current_topology()
        return self._launched

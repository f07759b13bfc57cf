"""The exit of a process whose last background save has failed, where nobody was told: its status is not 0.

Python fixes the status of a process before the functions registered with ``atexit`` run, and offers one documented way
to change it afterwards: it becomes 120 if a standard stream cannot be flushed (see ``sys.exit``). So the standard error
is replaced by one whose ``flush`` fails. Everything else of the interpreter's end runs as ever, which ``os._exit``
would skip: other libraries' functions, log files, worker processes.
"""

import atexit
import logging
import sys
from typing import Any, TextIO, final

_LOG = logging.getLogger(__name__)
STATUS = 120
"""The exit status then, whatever the script gave to ``sys.exit``."""


@final
class UntoldFailure:
    """A failure that makes the process end with ``STATUS``, unless somebody is told of it before."""

    def __init__(self, text: str) -> None:
        self._text = text
        atexit.register(self._end_badly)

    def told(self) -> None:
        """Takes it back: the failure was raised where the script could see it."""
        atexit.unregister(self._end_badly)

    def _end_badly(self) -> None:
        if getattr(sys, "last_value", None) is not None:  # an exception ends the process, with its own status
            _LOG.error("%s", self._text)
            return
        _LOG.error("%s; the process ends with status %d", self._text, STATUS)
        sys.stderr = _Unflushable(sys.stderr)


@final
class _Unflushable:
    """A stream like the one inside, except that flushing it, which works, is reported as failed."""

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream

    @property
    def closed(self) -> bool:
        """Python flushes no stream that is closed."""
        return False

    def write(self, text: str) -> int:
        return 0 if self._stream is None else self._stream.write(text)

    def flush(self) -> None:
        if self._stream is not None:
            self._stream.flush()
        # The error that library code expects of a stream at the end of a process, and passes over.
        raise ValueError(f"a background save has failed, so this process ends with status {STATUS}")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

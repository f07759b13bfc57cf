"""Exit status of a process whose last background save failed without the error being raised: it is not 0.

Python fixes the exit status before the functions registered with ``atexit`` run, and documents one way to change it
later: the status becomes 120 if a standard stream cannot be flushed (see ``sys.exit``). Standard error is therefore
replaced by a stream whose ``flush`` raises. All other steps of the interpreter's exit run as usual, whereas
``os._exit`` would skip exit functions of other libraries, log files and worker processes.
"""

import atexit
import logging
import os
import sys
from typing import Any, TextIO, final

_LOG = logging.getLogger(__name__)
STATUS = 120
"""Exit status in that case, whatever the script passed to ``sys.exit``."""


@final
class UntoldFailure:
    """Failure that makes the process exit with ``STATUS``, unless the error is raised before."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._process = os.getpid()
        atexit.register(self._end_badly)

    def told(self) -> None:
        """Cancels the exit status: the error was raised where the script can handle it."""
        atexit.unregister(self._end_badly)

    def _end_badly(self) -> None:
        if os.getpid() != self._process:  # a forked child, whose status is that of its own work
            return
        if getattr(sys, "last_value", None) is not None:  # an exception ends the process, with its own status
            _LOG.error("%s", self._text)
            return
        _LOG.error("%s; the process ends with status %d", self._text, STATUS)
        sys.stderr = _Unflushable(sys.stderr)


@final
class _Unflushable:
    """Wraps a stream; ``flush`` flushes it, but raises as if that had failed."""

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream

    @property
    def closed(self) -> bool:
        """False, because Python does not flush closed streams."""
        return False

    def write(self, text: str) -> int:
        return 0 if self._stream is None else self._stream.write(text)

    def flush(self) -> None:
        if self._stream is not None:
            self._stream.flush()
        # Library code that flushes streams at the end of a process expects and ignores this type of error.
        raise ValueError(f"a background save has failed, so this process ends with status {STATUS}")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

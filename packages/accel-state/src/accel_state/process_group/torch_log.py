"""Suppression of warnings that torch's C++ code prints, for callers that handle the error behind them."""

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

_ERROR = 2
# torch has one log level per process, so the nesting is tracked per process too.
_lock = threading.Lock()
_levels: list[int] = []


@contextmanager
def no_warnings() -> Iterator[None]:
    """Limits the log of torch's C++ code to errors inside the block, in all threads of this process.

    When its server ends, a TCPStore prints about 30 lines of stack frames as a warning besides raising the exception.
    The level is that of ``TORCH_CPP_LOG_LEVEL``, which torch reads once. No effect if torch was built with another
    logger than its own.
    """
    level = _level()
    if level is None:
        yield
        return
    with _lock:
        _levels.append(level.value)
        level.value = max(level.value, _ERROR)
    try:
        yield
    finally:
        with _lock:
            before = _levels[0]
            _levels.pop()
            if not _levels:
                level.value = before


@cache
def _level() -> ctypes.c_int | None:
    try:
        return ctypes.c_int.in_dll(ctypes.CDLL("libc10.so"), "FLAGS_caffe2_log_level")
    except (OSError, ValueError):
        return None

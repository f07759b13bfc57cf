"""The warnings that torch's C++ code prints, held back where the error behind them is handled."""

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

_ERROR = 2
# torch has one level for the process, so what is held back belongs to the process too.
_lock = threading.Lock()
_levels: list[int] = []


@contextmanager
def no_warnings() -> Iterator[None]:
    """torch's C++ code prints errors only meanwhile, in all threads of this process.

    A TCPStore prints some 30 lines of stack frames as a warning when its server goes away, beside the exception that it
    raises. The level is that of ``TORCH_CPP_LOG_LEVEL``, which torch reads once. Without effect where torch was built
    with another logger than its own.
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

"""Pickling by value of functions and classes that other processes cannot import (cloudpickle).

The processes run the same interpreter, and the bytes are never kept.
"""

import io
import marshal
from types import CodeType
from typing import Any

from accel_state.errors import LaunchError


def dumps(value: Any) -> bytes:
    """Pickles ``value``; functions keep the file names that their tracebacks show.

    Raises:
        LaunchError: cloudpickle is not installed.
        Exception: of any type, if ``value`` cannot be pickled.
    """
    cloudpickle = require_cloudpickle()

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc, name-defined]
        """Keeps ``co_filename``, which cloudpickle 3.1.3 replaces by ``<dynamic-code>``."""

        def reducer_override(self, item: Any) -> Any:
            if isinstance(item, CodeType):
                return marshal.loads, (marshal.dumps(item),)
            return super().reducer_override(item)

    stream = io.BytesIO()
    Pickler(stream).dump(value)
    return stream.getvalue()


def loads(data: bytes) -> Any:
    """Unpickles bytes that ``dumps`` returned in a process of the same launch."""
    return require_cloudpickle().loads(data)


def require_cloudpickle() -> Any:
    """Imports cloudpickle.

    Raises:
        LaunchError: cloudpickle is not installed.
    """
    try:
        import cloudpickle
    except ImportError as error:
        raise LaunchError(
            "starting processes from an interpreter needs cloudpickle; install it, or accel-training[notebook]"
        ) from error
    return cloudpickle

"""Accelerate's import paths over accel, of the distribution accel-compat, and ``python -m accel.compat script.py``."""

from importlib import import_module
from typing import Any

_PACKAGE = "accel_compat"


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    try:
        package = import_module(_PACKAGE)
    except ModuleNotFoundError as error:
        if error.name != _PACKAGE:
            raise
        raise ImportError(
            f"accel.compat.{name} is in the distribution accel-compat: pip install accel-compat"
        ) from error
    return getattr(package, name)

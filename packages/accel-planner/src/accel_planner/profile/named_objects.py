"""Import of objects that a command line names as ``module:attribute``."""

import sys
from collections.abc import Callable
from difflib import get_close_matches
from functools import reduce
from importlib import import_module
from pathlib import Path
from typing import Any

from accel_state.errors import ConfigError


def load_object(text: str, what: str) -> Any:
    """Imports the object ``module:attribute`` or ``path/to/file.py:attribute``; also searches the working directory.

    Raises:
        ConfigError: it cannot be found; names the nearest name that can.
    """
    module_name, colon, attribute = text.rpartition(":")
    if not colon or not module_name or not attribute:
        raise ConfigError(f"{what} {text!r} is not understood; expected module:name, such as mymodels:build")
    folder = str(Path.cwd())
    if module_name.endswith(".py"):
        path = Path(module_name)
        folder, module_name = str(path.resolve().parent), path.stem
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        module = import_module(module_name)
    except ImportError as error:
        raise ConfigError(f"{what} {text!r}: {module_name} cannot be imported: {error}") from error
    try:
        return reduce(getattr, attribute.split("."), module)
    except AttributeError:
        near = get_close_matches(attribute, [name for name in vars(module) if not name.startswith("_")], n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(f"{what} {text!r}: {module_name} has no {attribute}{hint}") from None


def load_function(text: str, what: str) -> Callable[..., Any]:
    """Like ``load_object``, for callables.

    Raises:
        ConfigError: it cannot be found or called.
    """
    found = load_object(text, what)
    if not callable(found):
        raise ConfigError(f"{what} {text!r} is a {type(found).__name__}; expected a function")
    return found  # type: ignore[no-any-return]

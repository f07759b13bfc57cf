"""Packages whose names are imported on first use, so that importing the package costs next to nothing (PEP 562)."""

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy_names(package: str, places: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """The ``__getattr__`` and ``__dir__`` of ``package``, which has an ``__all__``.

    ``places`` says for each name the module that defines it, relative to the package if it begins with a dot;
    ``module:original`` where it has another name there, ``module:`` for the module itself.
    """

    def __getattr__(name: str) -> Any:
        if name not in places:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module, colon, original = places[name].partition(":")
        found = import_module(module, package)
        return found if colon and not original else getattr(found, original or name)

    def __dir__() -> list[str]:
        return sorted(sys.modules[package].__all__)

    return __getattr__, __dir__

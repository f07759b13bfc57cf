"""Packages whose names are imported on first use, so that importing the package costs next to nothing (PEP 562)."""

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy_names(
    package: str, places: Mapping[str, str], *, advice: str | None = None
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """The ``__getattr__`` and ``__dir__`` of ``package``, which has an ``__all__``.

    ``places`` says for each name the module that defines it, relative to the package if it begins with a dot;
    ``module:original`` where it has another name there, ``module:`` for the module itself. ``advice``: a module whose
    function of that name gives what an error about an unknown name adds, or an empty text.
    """

    def __getattr__(name: str) -> Any:
        if name not in places:
            added = import_module(advice).advice(name) if advice is not None else ""
            # `from package import name` replaces an AttributeError by an ImportError without its text.
            if added and sys._getframe(1).f_code.co_name == "_handle_fromlist":
                raise ImportError(f"cannot import name {name!r} from {package!r}{added}", name=package)
            raise AttributeError(f"module {package!r} has no attribute {name!r}{added}")
        module, colon, original = places[name].partition(":")
        found = import_module(module, package)
        return found if colon and not original else getattr(found, original or name)

    def __dir__() -> list[str]:
        return sorted(sys.modules[package].__all__)

    return __getattr__, __dir__

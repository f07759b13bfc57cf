"""Lazy imports of a package's public names, which keep ``import package`` fast (PEP 562)."""

import re
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

_LISTED = re.compile(r"^from (\S+) import \(?\s*(\w+) as (\w+)", re.MULTILINE)


def attach_stub(
    package: str, file: str, *, advice: str | None = None
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Returns ``__getattr__``, ``__dir__`` and ``__all__`` of ``package`` from the stub beside its ``__init__.py``.

    ``__init__.pyi`` lists each public name once, as ``from module import name as name``; type checkers read the same
    file (Scientific Python's SPEC 1). ``from . import module as module`` makes a submodule an attribute; submodules are
    not in ``__all__``. ``advice`` names a module with a function ``advice(name)``, whose result (possibly empty) is
    appended to the error about an unknown name.
    """
    listed = _LISTED.findall(Path(file).with_suffix(".pyi").read_text(encoding="utf-8"))
    # Texts, because a tuple for each name would count towards the next collection of garbage.
    origins = {name: f"{module} {original}" for module, original, name in listed}

    def __getattr__(name: str) -> Any:
        if name not in origins:
            added = import_module(advice).advice(name) if advice is not None else ""
            # `from package import name` replaces an AttributeError by an ImportError without its text.
            if added and sys._getframe(1).f_code.co_name == "_handle_fromlist":
                raise ImportError(f"cannot import name {name!r} from {package!r}{added}", name=package)
            raise AttributeError(f"module {package!r} has no attribute {name!r}{added}")
        module, original = origins[name].split()
        if module == ".":
            return import_module(f".{original}", package)
        return getattr(import_module(module, package), original)

    public = sorted(name for module, _, name in listed if module != ".")
    return __getattr__, lambda: public, public

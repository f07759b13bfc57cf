"""Finder that resolves ``accelerate`` and its submodules to this package, while it is installed."""

import importlib.metadata
import re
import sys
from collections.abc import Iterator, Sequence
from importlib import import_module
from importlib.abc import InspectLoader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, final

from accel_state.lazy import attach_stub

NAME = "accelerate"
VERSION = "1.15.0"
TREE = Path(__file__).parent / "tree"
_SAME = re.compile(r"^from (\S+) import \*", re.MULTILINE)
_METADATA = f"Metadata-Version: 2.1\nName: {NAME}\nVersion: {VERSION}\n"


def stub_of(name: str) -> Path | None:
    """Returns the file that lists the names of a module ``accelerate.…``; None if Accelerate has no such module."""
    parts = name.split(".")[1:]
    package = TREE.joinpath(*parts, "__init__.pyi")
    if package.is_file():
        return package
    module = TREE.joinpath(*parts[:-1], f"{parts[-1]}.pyi") if parts else package
    return module if module.is_file() else None


@final
class _Facts(importlib.metadata.Distribution):
    """Metadata of the Accelerate release whose names and semantics are offered."""

    def read_text(self, filename: str) -> str | None:
        return _METADATA if filename == "METADATA" else None

    def locate_file(self, path: Any) -> Any:
        return TREE / path


@final
class _Loader(InspectLoader):
    """Makes modules whose names are imported from the places that their stub lists, on first use."""

    def get_source(self, fullname: str) -> str:
        """Source that ``python -m accelerate.X`` runs: the module's ``main``, if it has one."""
        stub = stub_of(fullname)
        if stub is not None and " as main\n" in stub.read_text(encoding="utf-8"):
            return f"from {fullname} import main\nraise SystemExit(main())\n"
        return f"raise SystemExit('{fullname} cannot be run; accelerate --help lists the commands')\n"

    def get_code(self, fullname: str) -> CodeType:
        return compile(self.get_source(fullname), str(stub_of(fullname)), "exec")

    def is_package(self, fullname: str) -> bool:
        stub = stub_of(fullname)
        return stub is not None and stub.name == "__init__.pyi"

    def exec_module(self, module: ModuleType) -> None:
        stub = stub_of(module.__name__)
        assert stub is not None
        read, listed, public = attach_stub(module.__name__, str(stub))

        def fetch(name: str) -> Any:
            value = read(name)
            module.__dict__[name] = value
            return value

        module.__file__ = str(stub)
        module.__dict__.update(__getattr__=fetch, __dir__=listed, __all__=public)
        if module.__name__ == NAME:
            module.__dict__["__version__"] = VERSION


@final
class _SameLoader(InspectLoader):
    """Gives a module of this package under Accelerate's name too, so that its names can be replaced there."""

    def __init__(self, module: ModuleType) -> None:
        self.module = module
        self.spec = module.__spec__

    def get_source(self, fullname: str) -> str:
        """Source that ``python -m accelerate.X`` runs."""
        return f"from {fullname} import main\nraise SystemExit(main())\n"

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self.module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self.spec


def _loader(stub: Path) -> InspectLoader:
    same = _SAME.search(stub.read_text(encoding="utf-8"))
    return _Loader() if same is None else _SameLoader(import_module(same[1]))


@final
class _Finder(MetaPathFinder):
    """First entry of ``sys.meta_path`` while Accelerate's names are offered."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        if fullname.split(".")[0] != NAME:
            return None
        stub = stub_of(fullname)
        if stub is None:
            return None  # the parent's folder has no other module, and a finder of the program may know one
        package = stub.name == "__init__.pyi"
        spec = ModuleSpec(fullname, _loader(stub), origin=str(stub), is_package=package)
        if package:
            spec.submodule_search_locations = [str(stub.parent)]
        return spec

    def find_distributions(self, context: Any = None) -> Iterator[importlib.metadata.Distribution]:
        if context is not None and context.name is not None and context.name.lower() == NAME:
            yield _Facts()


def install() -> None:
    """Makes ``import accelerate`` resolve to accel in this process, also beside an installed Accelerate.

    Raises:
        RuntimeError: modules of an installed Accelerate were imported before.
    """
    if is_installed():
        return
    loaded = sys.modules.get(NAME)
    if loaded is not None:
        raise RuntimeError(
            f"accelerate was imported from {loaded.__file__} before accel.compat was installed; install it first"
        )
    sys.meta_path.insert(0, _Finder())


def uninstall() -> None:
    """Removes the finder and the modules that it made; ``import accelerate`` then finds an installed Accelerate."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _Finder)]
    for name in [name for name in sys.modules if name == NAME or name.startswith(f"{NAME}.")]:
        module = sys.modules[name]
        if isinstance(getattr(module.__spec__, "loader", None), _Loader) or module.__name__ != name:
            del sys.modules[name]


def is_installed() -> bool:
    """Whether ``import accelerate`` resolves to accel in this process."""
    return any(isinstance(finder, _Finder) for finder in sys.meta_path)

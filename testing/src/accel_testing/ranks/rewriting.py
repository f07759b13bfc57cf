"""Import of test modules on ranks with pytest's assertion rewriting, so that failing asserts show their values."""

import importlib
import importlib.util
import os
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING, Any, final

from accel_testing.ranks.wire import ModuleSource

if TYPE_CHECKING:
    import pytest


@final
class RewritingConfig:
    """Pytest configuration that only rewrites and explains asserts; nothing is collected with it."""

    def __init__(self, config: "pytest.Config") -> None:
        self._config = config

    def mark(self, name: str) -> None:
        """Marks the module of this name for rewriting at its import, whatever its file is called."""
        import pytest

        pytest.register_assert_rewrite(name)

    @contextmanager
    def explained_comparisons(self) -> Iterator[None]:
        """Makes ``assert a == b`` explain the difference, within the block."""
        from _pytest.assertion import util

        before = util._reprcompare
        util._reprcompare = self._explain
        try:
            yield
        finally:
            util._reprcompare = before

    def _explain(self, op: str, left: object, right: object) -> str | None:
        hook = self._config.hook.pytest_assertrepr_compare
        for found in hook(config=self._config, op=op, left=left, right=right):
            if lines := [line.replace("\n", "\\n") for line in found or ()]:
                return "\n~".join(lines[:200]).replace("%", "%%")
        return None

    def filter_warnings(self, filters: Iterable[str]) -> None:
        """Applies filters in the syntax of the ``filterwarnings`` option and mark; the last one takes precedence."""
        from _pytest.config import parse_warning_filter

        for text in filters:
            warnings.filterwarnings(*parse_warning_filter(text, escape=False))


@cache
def rewriting_config() -> RewritingConfig:
    """Configuration of this process, made on first use: before ranks are forked, so that they share it."""
    from _pytest import config as pytest_config
    from _pytest.assertion import install_importhook

    unwanted = ("cacheprovider", "terminal", "logging", "debugging", "capture")
    arguments = ["--disable-plugin-autoload", *(f"-pno:{name}" for name in unwanted), "-c", os.devnull, "--noconftest"]
    config: Any = pytest_config._prepareconfig(arguments)
    if not any(type(finder).__name__ == "AssertionRewritingHook" for finder in sys.meta_path):
        install_importhook(config)
    return RewritingConfig(config)


def import_source(source: ModuleSource) -> ModuleType:
    """Imports the module of this file under this name, once in this process."""
    known = sys.modules.get(source.name)
    if known is not None and getattr(known, "__file__", None) == source.file:
        return known
    rewriting_config().mark(source.name)
    # An importable name refers to that module, because a test inside a package has relative imports.
    if _is_importable(source):
        return importlib.import_module(source.name)
    return _import_file(source)


def _is_importable(source: ModuleSource) -> bool:
    sys.modules.pop(source.name, None)
    try:
        spec = importlib.util.find_spec(source.name)
    except (ImportError, AttributeError, ValueError):
        return False
    return spec is not None and spec.origin == source.file


def _import_file(source: ModuleSource) -> ModuleType:
    folder = os.path.dirname(source.file)
    for finder in sys.meta_path:
        spec = finder.find_spec(source.name, [folder])
        if spec is not None and spec.origin == source.file:
            break
    else:
        spec = importlib.util.spec_from_file_location(source.name, source.file)
    if spec is None or spec.loader is None:
        raise ImportError(f"no module can be made of {source.file}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[source.name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[source.name]
        raise
    return module

"""Modules of accel that have the names of Accelerate 1.15."""

import re
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from accel import absent
from accel_compat.finder import NAME, stub_of

OURS = "accel"
_LISTED = re.compile(r"^from (\S+) import \(?\s*(\w+) as (\w+)", re.MULTILINE)
_SAME = re.compile(r"^from (\S+) import \*", re.MULTILINE)
_ELSEWHERE = {"MegatronLMPlugin": "accel_megatron"}
"""Names that another distribution has, with its module."""


def is_theirs(module: str) -> bool:
    """Whether this is a module of Accelerate, by its path."""
    return module == NAME or module.startswith(f"{NAME}.")


def is_module(path: str) -> bool:
    """Whether Accelerate has a module of this path."""
    return is_theirs(path) and stub_of(path) is not None


def module_here(path: str) -> str | None:
    """accel's module for a module of Accelerate; None if it has no such module."""
    ours = OURS + path.removeprefix(NAME)
    return ours if _exists(ours) else None


def is_known(module: str, name: str) -> bool:
    """Whether Accelerate's module has this name, or a submodule of this name."""
    in_tests = module.startswith(f"{NAME}.test_utils")  # a package of helpers, which accel-compat does not list
    return in_tests or name in _origins(module) or is_module(f"{module}.{name}")


def home_of(module: str, name: str) -> str | None:
    """accel's module that has the name of a module of Accelerate; None if accel lacks the name."""
    ours = module_here(module)
    if ours is not None and (has(ours, name) or _exists(f"{ours}.{name}")):
        return ours
    if is_module(f"{module}.{name}") and name not in _origins(module):
        return None
    if name in _ELSEWHERE:
        return _ELSEWHERE[name]
    return next((other for other in (OURS, f"{OURS}.utils") if has(other, name)), None)


def is_attribute(path: str) -> bool:
    """Whether ``import accel`` alone makes this module of accel reachable as an attribute."""
    names = path.split(".")[1:]
    here: Any = import_module(OURS)
    for name in names:
        if name not in _submodules(here.__name__):
            return False
        here = getattr(here, name)
    return isinstance(here, ModuleType)


def instead_of(name: str) -> str:
    """What accel has instead of a name that it lacks, as a remedy."""
    said = absent.advice(name).removeprefix(", which Accelerate has: ")
    return said or "accel launch --compat runs the script as it is"


def object_here(module: str, name: str) -> Any:
    """accel's object; None if it cannot be imported."""
    try:
        return getattr(import_module(module), name, None)
    except ImportError:
        return None


def object_there(module: str, name: str) -> Any:
    """The object that accel-compat gives for a name of Accelerate, which has Accelerate's signature; None if none."""
    origin = _origins(module).get(name)
    return None if origin is None else object_here(*origin)


@cache
def _origins(module: str) -> dict[str, tuple[str, str]]:
    stub = stub_of(module) if is_theirs(module) else None
    if stub is None:
        return {}
    text = stub.read_text(encoding="utf-8")
    same = _SAME.search(text)
    if same is not None:
        return {name: (same[1], name) for name in dir(import_module(same[1]))}
    return {name: (source, original) for source, original, name in _LISTED.findall(text) if source != "."}


@cache
def has(module: str, name: str) -> bool:
    """Whether a module of accel has this name."""
    if not _exists(module):
        return False
    try:
        return name in dir(import_module(module))
    except ImportError:
        return False


@cache
def _exists(module: str) -> bool:
    parent = module.rpartition(".")[0]
    return (not parent or (_exists(parent) and hasattr(import_module(parent), "__path__"))) and bool(find_spec(module))


@cache
def _submodules(module: str) -> frozenset[str]:
    file = import_module(module).__file__ or ""
    stub = re.sub(r"\.py$", ".pyi", file)
    try:
        with open(stub, encoding="utf-8") as text:
            return frozenset(name for source, _, name in _LISTED.findall(text.read()) if source == ".")
    except OSError:
        return frozenset()

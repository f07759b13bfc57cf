"""Arguments, attributes and members that accel lacks, by comparison of signatures."""

import ast
import inspect
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from enum import EnumMeta
from functools import cache
from typing import Any

from accel import Accelerator
from accel.absent import missing_on_accelerator
from accel_compat.facade.accelerator import CompatAccelerator
from accel_compat.migration.differences import ARGUMENTS
from accel_compat.migration.known_names import home_of, object_here, object_there

_STORED = frozenset(("clock", "config", "policy", "project_configuration", "session"))
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def unknown_arguments(node: ast.Call, name: str, pair: tuple[Any, Any]) -> list[tuple[ast.expr, str, str, str]]:
    """Arguments of a call that accel's callable does not take, or takes for another.

    Returns the argument, the rule, its description and the remedy of each.
    """
    ours, theirs = map(_parameters, pair)
    if ours is None:
        return []
    found: list[tuple[ast.expr, str, str, str]] = []
    if not any(one.kind is inspect.Parameter.VAR_KEYWORD for one in ours.values()):
        for keyword in node.keywords:
            if keyword.arg is not None and keyword.arg not in ours:
                remedy = ARGUMENTS.get((name, keyword.arg)) or _nearest(keyword.arg, ours)
                found.append((keyword.value, "argument", f"{name}({keyword.arg}=)", remedy))
    if theirs is not None and not any(one.kind is inspect.Parameter.VAR_POSITIONAL for one in ours.values()):
        here, there = _in_order(ours), _in_order(theirs)
        for place, value in enumerate(node.args):
            if isinstance(value, ast.Starred):
                break
            if place < len(there) and there[place] != (here[place] if place < len(here) else None):
                found.append((value, "position-of-argument", f"argument {place + 1} of {name}, {there[place]},", ""))
    return found


def callables(module: str, name: str) -> tuple[Any, Any]:
    """accel's object and that of accel-compat, which has Accelerate's signature; None where there is none."""
    home = home_of(module, name)
    return (None if home is None else object_here(home, name)), object_there(module, name)


def methods(name: str) -> tuple[Any, Any]:
    """The method of accel's Accelerator and that of accel-compat's."""
    return _bound(Accelerator, name), _bound(CompatAccelerator, name)


def missing_attribute(name: str) -> tuple[str, str] | None:
    """An attribute of Accelerate's Accelerator that accel's lacks, and the remedy; None: accel's has it, or neither."""
    if name in _STORED or hasattr(Accelerator, name):
        return None
    error = missing_on_accelerator(None, name)
    if error is not None:
        return name, str(error).partition(", which Accelerate has: ")[2]
    return (name, "accel launch --compat runs the script as it is") if hasattr(CompatAccelerator, name) else None


def missing_member(owner: Any, name: str) -> str | None:
    """The remedy for a member that an enumeration of accel does not have; None if it has the member."""
    if not isinstance(owner, EnumMeta) or hasattr(owner, name):
        return None
    return _nearest(name, owner.__members__)


def _bound(owner: type, name: str) -> Callable[..., Any] | None:
    found = inspect.getattr_static(owner, name, None)
    if isinstance(found, staticmethod):
        return found.__func__
    if not inspect.isfunction(found):
        return None
    return getattr(object.__new__(owner), name, None)


@cache
def _parameters(target: Any) -> Mapping[str, inspect.Parameter] | None:
    if not callable(target):
        return None
    try:
        return inspect.signature(target).parameters
    except (TypeError, ValueError):
        return None


def _in_order(parameters: Mapping[str, inspect.Parameter]) -> list[str]:
    return [name for name, one in parameters.items() if one.kind in _POSITIONAL]


def _nearest(name: str, known: Mapping[str, Any]) -> str:
    near = get_close_matches(name, known, n=1)
    return f"the nearest is {near[0]}" if near else f"there are {', '.join(known)}"

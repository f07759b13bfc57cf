"""Expressions of a script that are an Accelerator, or a schedule that was prepared, as far as the source shows."""

import ast
import re
from collections.abc import Iterator
from typing import final

from accel_compat.migration.imports import Imports

ACCELERATOR = "Accelerator"
_SCHEDULE = re.compile(r"sched(uler)?$|^(lr_)?scheduler", re.IGNORECASE)
_SCHEDULE_MAKER = re.compile(r"(LR|Restarts|Scheduler|_schedule\w*|get_scheduler|ReduceLROnPlateau)$")
_BY_NAME = "accelerator"


@final
class Objects:
    """Names of a script that stand for an Accelerator: assigned from one, annotated as one, or called accelerator.

    Scopes are not told apart: a name is an Accelerator in the entire script.
    """

    def __init__(self, tree: ast.Module, imports: Imports) -> None:
        self._imports = imports
        self._accelerators = {_BY_NAME}
        self.schedules: set[str] = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign):
                self._assigned(node.targets, node.value)
            elif isinstance(node, ast.AnnAssign) and node.value is not None:
                self._assigned([node.target], node.value)
            elif isinstance(node, ast.arg) and node.annotation is not None and self._names_class(node.annotation):
                self._accelerators.add(node.arg)

    def _assigned(self, targets: list[ast.expr], value: ast.expr) -> None:
        if not isinstance(value, ast.Call):
            return
        if self.is_class(value.func):
            self._accelerators.update(map(_name, targets))
        elif _SCHEDULE_MAKER.search(_name(value.func)):
            self.schedules.update(map(_name, targets))

    def _names_class(self, node: ast.expr) -> bool:
        return any(self.is_class(part) for part in ast.walk(node) if isinstance(part, ast.Name | ast.Attribute))

    def is_class(self, node: ast.expr) -> bool:
        """Whether an expression is the class ``Accelerator``."""
        found = self._imports.resolve(node)
        return found is not None and found[1] == ACCELERATOR

    def is_accelerator(self, node: ast.expr) -> bool:
        """Whether an expression is an Accelerator."""
        return _name(node) in self._accelerators

    def method(self, node: ast.Call) -> str | None:
        """Name of the Accelerator's method that a call calls; None: something else is called."""
        is_method = isinstance(node.func, ast.Attribute) and self.is_accelerator(node.func.value)
        return node.func.attr if is_method and isinstance(node.func, ast.Attribute) else None

    def is_schedule(self, node: ast.expr) -> bool:
        """Whether an expression is a schedule of learning rates."""
        return _name(node) in self.schedules or bool(_SCHEDULE.search(_name(node)))

    def is_schedule_maker(self, node: ast.Call) -> bool:
        """Whether a call makes a schedule."""
        return bool(_SCHEDULE_MAKER.search(_name(node.func)))


def _name(node: ast.expr) -> str:
    """Last name of an expression: of ``self.accelerator`` it is ``accelerator``; empty for other expressions."""
    if isinstance(node, ast.Name):
        return node.id
    return node.attr if isinstance(node, ast.Attribute) else ""


def parents(tree: ast.Module) -> dict[ast.AST, ast.AST]:
    """The node that each node is in."""
    return {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}


def blocks(tree: ast.Module) -> Iterator[list[ast.stmt]]:
    """Lists of statements that run one after the other."""
    for node in ast.walk(tree):
        for name in ("body", "orelse", "finalbody"):
            block = getattr(node, name, None)
            if isinstance(block, list) and block:
                yield block


def own_calls(statement: ast.stmt) -> Iterator[ast.Call]:
    """Calls in a statement, those in functions that it defines left out."""
    waiting: list[ast.AST] = [statement]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
            continue
        if isinstance(node, ast.Call):
            yield node
        waiting.extend(ast.iter_child_nodes(node))


def argument(node: ast.Call, name: str, place: int | None = None) -> ast.expr | None:
    """Value of an argument, by name or by place; None if it is not given."""
    for keyword in node.keywords:
        if keyword.arg == name:
            return keyword.value
    if place is not None and len(node.args) > place and not any(isinstance(one, ast.Starred) for one in node.args):
        return node.args[place]
    return None


def is_constant(node: ast.expr | None, value: object) -> bool:
    """Whether an expression is this constant."""
    return isinstance(node, ast.Constant) and node.value is value

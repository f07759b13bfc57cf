"""Imports of Accelerate and of accel in a script, and the names that they bind."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import final

from accel_compat.finder import NAME
from accel_compat.migration.known_names import OURS, is_module, is_theirs

_NAMED = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.ExceptHandler | ast.MatchAs | ast.MatchStar


def _is_ours(module: str) -> bool:
    return module.split(".")[0] in (OURS, "accel_megatron")


@final
@dataclass(slots=True)
class Imports:
    """Names that a script binds to Accelerate's or accel's modules and objects, in any of its scopes.

    Attributes:
        statements: import statements that name a module of Accelerate.
        roots: names that are bound to modules of Accelerate, as opposed to accel's.
        modules: path of the module, in Accelerate's tree, by the name that the script has for it.
        objects: module and name of an object, in Accelerate's tree, by the name that the script has for it.
        other: names that the script binds in another way.
    """

    statements: list[ast.Import | ast.ImportFrom] = field(default_factory=list)
    roots: set[str] = field(default_factory=set)
    modules: dict[str, str] = field(default_factory=dict)
    objects: dict[str, tuple[str, str]] = field(default_factory=dict)
    other: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, tree: ast.Module) -> "Imports":
        """Reads the imports of a script."""
        found = cls()
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                found._add_import(node)
            elif isinstance(node, ast.ImportFrom):
                found._add_from(node)
            else:
                found.other.update(_bound(node))
        return found

    def _add_import(self, node: ast.Import) -> None:
        for alias in node.names:
            if not (is_theirs(alias.name) or _is_ours(alias.name)):
                self.other.add(alias.asname or alias.name.split(".")[0])
                continue
            bound = alias.asname or alias.name.split(".")[0]
            if is_theirs(alias.name):
                self.roots.add(bound)
                if node not in self.statements:
                    self.statements.append(node)
            if alias.asname is not None:
                self.modules[alias.asname] = _as_theirs(alias.name)
            else:
                self.modules[alias.name.split(".")[0]] = NAME

    def _add_from(self, node: ast.ImportFrom) -> None:
        module = node.module or ""
        if node.level or not (is_theirs(module) or _is_ours(module)):
            self.other.update(alias.asname or alias.name for alias in node.names)
            return
        if is_theirs(module):
            self.statements.append(node)
        for alias in node.names:
            path = f"{_as_theirs(module)}.{alias.name}"
            if is_module(path) and not alias.name[0].isupper():
                self.modules[alias.asname or alias.name] = path
                if is_theirs(module):
                    self.roots.add(alias.asname or alias.name)
            self.objects[alias.asname or alias.name] = (_as_theirs(module), alias.name)

    def resolve(self, node: ast.expr) -> tuple[str, str] | None:
        """Module and name, in Accelerate's tree, of the object that an expression names; None: of neither library."""
        if isinstance(node, ast.Name):
            return self.objects.get(node.id)
        if isinstance(node, ast.Attribute) and (module := self.module_of(node.value)) is not None:
            return module, node.attr
        return None

    def module_of(self, node: ast.expr) -> str | None:
        """Path, in Accelerate's tree, of the module that an expression names; None: no module of either library."""
        if isinstance(node, ast.Name):
            return self.modules.get(node.id)
        if isinstance(node, ast.Attribute) and (parent := self.module_of(node.value)) is not None:
            path = f"{parent}.{node.attr}"
            return path if is_module(path) else None
        return None


def _as_theirs(module: str) -> str:
    if module == "accel_megatron":
        return f"{NAME}.utils"
    return module if is_theirs(module) else NAME + module.removeprefix(OURS)


def _bound(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store | ast.Del):
        yield node.id
    elif isinstance(node, ast.arg):
        yield node.arg
    elif isinstance(node, _NAMED) and node.name is not None:
        yield node.name
    elif isinstance(node, ast.MatchMapping) and node.rest is not None:
        yield node.rest
    elif isinstance(node, ast.Global | ast.Nonlocal):
        yield from node.names

"""Renaming of Accelerate's imports, and of the module's name where a script uses it."""

import ast
import re
from collections.abc import Iterator
from typing import final

from accel_compat.finder import NAME
from accel_compat.migration.findings import Edit, Finding, Kind
from accel_compat.migration.imports import Imports
from accel_compat.migration.known_names import (
    OURS,
    has,
    home_of,
    instead_of,
    is_attribute,
    is_known,
    is_module,
    is_theirs,
    module_here,
)
from accel_compat.migration.source import ScriptSource

_FROM = re.compile(rb"from\s+([\w.]+)\s")
_TEXT = re.compile(rf"{NAME}((\.\w+)*|-(launch|config|merge-weights|estimate-memory)|\s+launch\b.*)$", re.DOTALL)
_COMMENT = re.compile(r"#[^\n]*")


@final
class Renaming:
    """Edits of one script, and findings about the names that accel lacks.

    Attributes:
        edits: what ``--write`` changes.
        findings: one for each import that changes, and one for each name that stays.
    """

    def __init__(self, source: ScriptSource, imports: Imports) -> None:
        self._source, self._imports = source, imports
        self.edits: list[Edit] = []
        self.findings: list[Finding] = []
        self._taken = OURS in imports.other or NAME in imports.other
        self._kept = [
            alias
            for node in imports.statements
            if isinstance(node, ast.Import)
            for alias in node.names
            if is_theirs(alias.name) and alias.asname is None and self._stays(alias.name)
        ]
        self._is_missing = False
        self._imported = {
            alias.name
            for node in imports.statements
            if isinstance(node, ast.Import)
            for alias in node.names
            if is_theirs(alias.name)
        }
        for node in imports.statements:
            if isinstance(node, ast.ImportFrom):
                self._rename_from(node)
            else:
                self._rename_import(node)
        self._rename_uses()
        if self._is_missing:
            self._add_imports()

    def _tell(self, node: ast.expr | ast.stmt | ast.alias, kind: Kind, rule: str, message: str, remedy: str) -> None:
        self.findings.append(Finding(*self._source.place(node), kind, rule, message, remedy))

    # from accelerate.utils import set_seed

    def _rename_from(self, node: ast.ImportFrom) -> None:
        assert node.module is not None
        homes: dict[str, list[ast.alias]] = {}
        for alias in node.names:
            homes.setdefault(self._home(node.module, alias), []).append(alias)
        if list(homes) == [node.module]:
            return
        shown = ", ".join(home for home in homes if home != node.module)
        self._tell(node, "rename", "import", f"{node.module} is {shown}", "accel migrate --write renames it")
        start = self._source.start(node)
        found = _FROM.match(self._source.utf8, start)
        if len(homes) == 1 and found is not None and found[1].decode() == node.module:
            self.edits.append(Edit(found.start(1), found.end(1), next(iter(homes))))
            return
        self.edits.append(Edit(start, self._source.end(node), self._divided(node, homes)))

    def _home(self, module: str, alias: ast.alias) -> str:
        """The module to import a name from: accel's, or Accelerate's own if accel lacks it."""
        if alias.name == "*":
            home = module_here(module)
            if home is None:
                self._tell(alias, "change", "import", f"accel has no module for {module}", "import each name by itself")
            else:
                self._tell(
                    alias,
                    "note",
                    "import",
                    f"* imports the names of {home}, which are fewer; calls of them are not checked",
                    "",
                )
            return home or module
        home = home_of(module, alias.name)
        if home is not None:
            return home
        self._tell(alias, "change", "name", *_lacking(module, alias.name))
        return module

    def _divided(self, node: ast.ImportFrom, homes: dict[str, list[ast.alias]]) -> str:
        """One statement for each module; comments between the names are kept above."""
        source = self._source
        before = source.utf8[source.line_start(node) : source.start(node)]
        behind = source.utf8[source.end(node) : source.line_end(node)].strip()
        statements = [
            f"from {home} import {', '.join(source.text_of(alias) for alias in aliases)}"
            for home, aliases in homes.items()
        ]
        if before.strip() or (behind and not behind.startswith(b"#")):
            return "; ".join(statements)
        newline = "\r\n" if source.utf8[: source.line_end(node)].endswith(b"\r\n") else "\n"
        comments = [found.rstrip() for found in _COMMENT.findall(source.text_of(node))]
        return f"{newline}{before.decode()}".join([*comments, *statements])

    # import accelerate

    def _rename_import(self, node: ast.Import) -> None:
        for alias in node.names:
            if not is_theirs(alias.name):
                continue
            ours = module_here(alias.name)
            if ours is None:
                self._tell(
                    alias, "change", "import", f"accel has no module for {alias.name}", _modules_instead(alias.name)
                )
                continue
            if alias.asname is None and self._taken:
                if self._kept:
                    self._tell(
                        alias, "change", "import", f"{alias.name} is {ours}", f"import {ours} under another name"
                    )
                    continue
                new = f"{OURS} as {NAME}"
            else:
                new = ours if alias.asname is None else f"{ours} as {alias.asname}"
            self._tell(alias, "rename", "import", f"{alias.name} is {ours}", "accel migrate --write renames it")
            self.edits.append(Edit(self._source.start(alias), self._source.end(alias), new))

    def _stays(self, module: str) -> bool:
        """Whether ``import module`` goes on binding Accelerate itself."""
        ours = module_here(module)
        return ours is None or (self._taken and not is_attribute(ours))

    def _add_imports(self) -> None:
        """Imports accel beside the modules of Accelerate that stay, because uses of the module's name were renamed."""
        for alias in self._kept:
            self._tell(alias, "rename", "import", f"{NAME} is {OURS}", f"accel migrate --write adds import {OURS}")
            end = self._source.end(alias)
            self.edits.append(Edit(end, end, f", {OURS}"))

    def _rename_uses(self) -> None:
        nodes = [node for node in ast.walk(self._source.tree) if isinstance(node, ast.Attribute | ast.Name)]
        heads = {node.value for node in nodes if isinstance(node, ast.Attribute)}
        for node in nodes:
            if node not in heads:
                self._rename_use(node)

    def _rename_use(self, node: ast.Attribute | ast.Name) -> None:
        """Renames the module at the head of ``accelerate.utils.set_seed``, or of the bare ``accelerate``."""
        root, names = _chain(node)
        base = None if root is None or root.id not in self._imports.roots else self._imports.modules[root.id]
        base_here = None if base is None else module_here(base)
        if root is None or base is None or base_here is None:
            return
        path, left = base, list(names)
        while left and is_module(f"{path}.{left[0].attr}"):
            path = f"{path}.{left.pop(0).attr}"
        ours = self._reachable(base_here, path, left[0].attr if left else None)
        if ours is None:
            module, _, name = path.rpartition(".")
            self._tell(node, "change", "name", *(_lacking(path, left[0].attr) if left else _lacking(module, name)))
            return
        if root.id == NAME and self._taken and self._kept:
            return
        head = left[0].value if left else node
        self._is_missing |= root.id == NAME and not self._taken
        root_here = OURS if root.id == NAME and not self._taken else root.id
        if (new := root_here + ours.removeprefix(base_here)) != self._source.text_of(head):
            self.edits.append(Edit(self._source.start(head), self._source.end(head), new))

    def _reachable(self, base_here: str, path: str, name: str | None) -> str | None:
        """Module of accel that has the name and that the script reaches from ``base_here``; None if there is none."""
        same = module_here(path)
        if name is None or name.startswith("__"):
            found = [same]
        else:
            found = [home_of(path, name), *(one for one in (f"{OURS}.utils", OURS) if has(one, name))]
        reached = (one for one in found if one is not None and (one == base_here or one.startswith(f"{base_here}.")))
        return next((one for one in reached if one == base_here or self._is_imported(one)), None)

    def _is_imported(self, ours: str) -> bool:
        """Whether the script's imports make a module of accel an attribute of its parent."""
        theirs = NAME + ours.removeprefix(OURS)
        return is_attribute(ours) or any(one == theirs or one.startswith(f"{theirs}.") for one in self._imported)


def _lacking(module: str, name: str) -> tuple[str, str]:
    if not is_known(module, name):
        return f"Accelerate 1.15 has no {module}.{name}", "remove it, or keep the Accelerate that has it"
    package = module.split(".")[1] if "." in module else ""
    return f"accel lacks {name} of {module}", instead_of(package if package == "test_utils" else name)


def _modules_instead(module: str) -> str:
    return instead_of(module.rpartition(".")[2])


def _chain(node: ast.expr) -> tuple[ast.Name | None, list[ast.Attribute]]:
    """The name at the head of a chain of attributes, and the attributes in their order."""
    attributes: list[ast.Attribute] = []
    while isinstance(node, ast.Attribute):
        attributes.insert(0, node)
        node = node.value
    return (node, attributes) if isinstance(node, ast.Name) else (None, [])


def texts(tree: ast.Module) -> Iterator[ast.Constant]:
    """Texts that name Accelerate: a module's path, or a command; docstrings are none."""
    nodes = list(ast.walk(tree))
    docstrings = {node.value for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in docstrings:
            yield from [node] * bool(_TEXT.match(node.value))

"""Structure of the sources: modules per folder, import cycles, imports between the rooms of each package.

A folder of tests has the name of the folder of sources that it tests, or is ``conformance``: it runs programs of other
libraries. Only the module of the Accelerator reads private attributes of an Accelerator.

A room is a folder or a module at the top of a package; ``private.py`` is none, because all of them may import it. An
arrow is a pair of rooms of which one imports the other at run time (imports under ``TYPE_CHECKING`` do not count). The
floors of a package are the longest chain of arrows.
Without arguments the check fails where a limit is passed; ``--show PACKAGE`` lists the arrows of one package.
"""

import ast
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MAX_MODULES = 15
FACADE = "accel.accelerator"
CONFORMANCE = "conformance"
# Floors and arrows between rooms, by package.
LIMITS: Mapping[str, tuple[int, int]] = {
    "accel": (5, 31),
    "accel_backends": (6, 26),
    "accel_ckpt": (6, 23),
    "accel_compat": (8, 25),
    "accel_data": (8, 51),
    "accel_deepspeed": (4, 24),
    "accel_inference": (5, 13),
    "accel_launch": (3, 7),
    "accel_megatron": (4, 9),
    "accel_observe": (2, 2),
    "accel_planner": (5, 11),
    "accel_state": (7, 46),
    "accel_testing": (4, 14),
}
Graph = Mapping[str, set[str]]


def sources() -> dict[str, Path]:
    """Every module of the packages and the harness, by dotted name."""
    found: dict[str, Path] = {}
    for base in [*sorted(ROOT.glob("packages/*/src")), ROOT / "testing" / "src"]:
        for path in sorted(base.rglob("*.py")):
            parts = path.relative_to(base).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def _only_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)


def _imports(node: ast.AST, *, lazy: bool) -> Iterator[ast.Import | ast.ImportFrom]:
    """Import statements below ``node`` that run; those inside functions only if ``lazy``."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child
        elif not _only_for_types(child) and (lazy or not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)):
            yield from _imports(child, lazy=lazy)


def imports(modules: Mapping[str, Path], *, lazy: bool) -> Graph:
    """Which modules each module imports at run time, among ``modules``."""
    graph: dict[str, set[str]] = {name: set() for name in modules}
    for name, path in modules.items():
        for node in _imports(ast.parse(path.read_text()), lazy=lazy):
            if isinstance(node, ast.Import):
                targets: Iterable[str] = (alias.name for alias in node.names)
            else:
                full = (f"{node.module}.{alias.name}" for alias in node.names)
                targets = (target if target in modules else str(node.module) for target in full)
            graph[name].update(target for target in targets if target in modules and target != name)
    return graph


def cycles(graph: Graph) -> list[list[str]]:
    """Strongly connected components of two or more nodes (Tarjan 1972)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for target in sorted(graph[node]):
            if target not in index:
                visit(target)
                low[node] = min(low[node], low[target])
            elif target in stack:
                low[node] = min(low[node], index[target])
        if low[node] == index[node]:
            component = stack[stack.index(node) :]
            del stack[stack.index(node) :]
            if len(component) > 1:
                found.append(sorted(component))

    for node in sorted(graph):
        if node not in index:
            visit(node)
    return found


def rooms(graph: Graph, package: str) -> Graph:
    """Imports between the rooms of one package."""
    between: dict[str, set[str]] = defaultdict(set)
    for name, targets in graph.items():
        for target in targets:
            if name.startswith(f"{package}.") and target.startswith(f"{package}."):
                here, there = name.split(".")[1], target.split(".")[1]
                if "private" in (here, there):
                    continue
                between[here].add(there)
                between.setdefault(there, set())
    return {room: targets - {room} for room, targets in between.items()}


def floors(graph: Graph) -> int:
    """Length of the longest chain of arrows, in rooms; rooms of one cycle share a floor."""
    shared = {room: min(cycle) for cycle in cycles(graph) for room in cycle}

    def home(room: str) -> str:
        return shared.get(room, room)

    above: dict[str, set[str]] = defaultdict(set)
    for room, targets in graph.items():
        above[home(room)] |= {home(target) for target in targets} - {home(room)}

    @cache
    def depth(room: str) -> int:
        return 1 + max((depth(target) for target in above.get(room, ())), default=0)

    return max(map(depth, list(above)), default=0)


def strangers(root: Path) -> Iterator[str]:
    """Folders of tests that no folder of sources of the same package has, and that are not of conformance."""
    for tests in [*sorted(root.glob("packages/*/tests")), root / "testing" / "tests"]:
        package = next((path for path in sorted((tests.parent / "src").glob("*")) if path.is_dir()), None)
        for folder in sorted(path for path in tests.glob("*") if path.is_dir() and any(path.glob("test_*.py"))):
            if folder.name != CONFORMANCE and (package is None or not (package / folder.name).is_dir()):
                yield f"{folder.relative_to(root)}: the sources have no folder {folder.name!r}"


def intruders(modules: Mapping[str, Path]) -> Iterator[str]:
    """Reads of an Accelerator's private attributes outside its own module.

    Code that needs a part of an Accelerator receives it as an argument.
    """
    for name, path in modules.items():
        if name == FACADE:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
                owner = node.value
                last = (
                    owner.id if isinstance(owner, ast.Name) else owner.attr if isinstance(owner, ast.Attribute) else ""
                )
                if last.strip("_") == "accelerator":
                    yield f"{name}:{node.lineno}: reads {node.attr} of an Accelerator; pass the part as an argument"


def complaints() -> Iterator[str]:
    yield from strangers(ROOT)
    modules = sources()
    yield from intruders(modules)
    folders: dict[Path, int] = defaultdict(int)
    for path in modules.values():
        if path.name not in ("__init__.py", "_version.py"):
            folders[path.parent] += 1
    for folder, count in folders.items():
        if count > MAX_MODULES:
            yield f"{folder.relative_to(ROOT)}: {count} modules; at most {MAX_MODULES} in a folder"
    for cycle in cycles(imports(modules, lazy=False)):
        yield f"import cycle: {' -> '.join(cycle)}"
    graph = imports(modules, lazy=True)
    for package, (most_floors, most_arrows) in LIMITS.items():
        between = rooms(graph, package)
        height, arrows = floors(between), sum(map(len, between.values()))
        if height > most_floors or arrows > most_arrows:
            yield f"{package}: {height} floors and {arrows} arrows; at most {most_floors} and {most_arrows}"


def show(package: str) -> None:
    between = rooms(imports(sources(), lazy=True), package)
    for room, targets in sorted(between.items()):
        print(f"{room} -> {', '.join(sorted(targets))}")
    for cycle in cycles(between):
        print(f"rooms in a cycle: {', '.join(cycle)}")
    print(f"{len(between)} rooms, {floors(between)} floors, {sum(map(len, between.values()))} arrows")


def main() -> int:
    if sys.argv[1:2] == ["--show"]:
        show(sys.argv[2])
        return 0
    found = list(complaints())
    print("\n".join(found))
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())

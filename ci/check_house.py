"""Fails when a source file outgrows the house rules or the public API changes without saying so.

Private names of torch and DeepSpeed are used in one module of each package, ``private.py``, which says what happens
without them. The name of a class is used once in all packages.

Sizes: a module has at most 450 lines, a function at most 90, 8 parameters at most are checked by ruff. The public
names of every package are recorded in ``ci/api/<package>.txt``; ``--update`` rewrites the records.
"""

import ast
import importlib
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MAX_MODULE, MAX_FUNCTION = 450, 90
# The Accelerator's own module consists of the docstrings of its methods, with one line of code each.
LONGER = {"packages/accel/src/accel/accelerator.py": 660}
FORBIDDEN = ("raise NotImplementedError", "TODO", "FIXME")
# Read on the user's word only (--trust-pickle).
TRUSTED = ("packages/accel-compat/src/accel_compat/checkpoints/trusted_pickles.py",)
# Between processes of one run; what lies on disk is never unpickled.
LIVE_PICKLES = (("packages", "accel-data"), ("packages", "accel-state"), ("testing", "src"))
PRIVATE = "private.py"
TORCH_MODULE = re.compile(r"torch(\.\w+)+")
UNPICKLING = {("torch", "load"), ("pickle", "load"), ("pickle", "loads")}


def sources() -> Iterator[Path]:
    """Every Python source of the packages and the harness, tests left out."""
    for base in [*sorted(ROOT.glob("packages/*/src")), ROOT / "testing" / "src"]:
        yield from sorted(base.rglob("*.py"))


def _parts(name: str) -> list[str]:
    return [part for part in name.split(".") if part.startswith("_") and not part.startswith("__")]


def torch_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Private names that a module reaches from ``torch``: by import, by attribute of an imported module, by string."""
    nodes, bound = list(ast.walk(tree)), set[str]()
    for node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            base = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            for alias in node.names:
                if f"{base}{alias.name}".split(".")[0] == "torch":
                    bound.add(alias.asname or (alias.name if base else "torch"))
                    yield from ((node.lineno, part) for part in _parts(f"{base}{alias.name}"))
    for node in nodes:
        if isinstance(node, ast.Attribute):
            chain = ast.unparse(node)
            if chain.split(".")[0] in bound and _parts(f"x.{node.attr}"):
                yield node.lineno, node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and TORCH_MODULE.fullmatch(node.value):
            yield from ((node.lineno, part) for part in _parts(node.value))


def reached(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Private names that a module reaches in any object: attributes except its own, strings, keywords."""
    own = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    own |= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    for node in ast.walk(tree):
        name, line = "", getattr(node, "lineno", 0)
        if isinstance(node, ast.Attribute):
            name = "" if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls") else node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
            name = node.value
        elif isinstance(node, ast.keyword) and node.arg:
            name, line = node.arg, node.value.lineno
        if _parts(name) and name not in own:
            yield line, name


def private_complaints(modules: Mapping[Path, ast.AST]) -> Iterator[str]:
    """Private names of torch and DeepSpeed outside ``private.py``.

    Of objects, those are known that some package's ``private.py`` names.
    """
    known = {name for path, tree in modules.items() if path.name == PRIVATE for _, name in reached(tree)}
    for path, tree in modules.items():
        if path.name != PRIVATE:
            found = {*torch_names(tree), *((line, name) for line, name in reached(tree) if name in known)}
            for line, name in sorted(found):
                owner = "torch or DeepSpeed"
                yield f"{path}:{line}: {name} is a private name of {owner}; use it in the package's {PRIVATE}"


def _lets_in_plain_values_only(call: ast.Call) -> bool:
    return any(
        keyword.arg == "weights_only" and isinstance(keyword.value, ast.Constant) and keyword.value.value is True
        for keyword in call.keywords
    )


def name_complaints(modules: Mapping[Path, ast.AST]) -> Iterator[str]:
    """Names of classes that two modules define, so that a reader of one cannot know which class is meant."""
    seen: dict[str, Path] = {}
    for path, tree in modules.items():
        for node in ast.iter_child_nodes(tree):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                other = seen.setdefault(node.name, path)
                if other != path:
                    yield f"{path}:{node.lineno}: {other} has a class {node.name} already"


def size_complaints(path: Path) -> Iterator[str]:
    text = path.read_text()
    name = path.relative_to(ROOT)
    if (lines := text.count("\n")) > LONGER.get(name.as_posix(), MAX_MODULE):
        yield f"{name}: {lines} lines; is a noun missing?"
    tree = ast.parse(text)
    plain = {
        id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call) and _lets_in_plain_values_only(node)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            size = (node.end_lineno or node.lineno) - node.lineno
            if size > MAX_FUNCTION:
                yield f"{name}:{node.lineno}: {node.name} has {size} lines"
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            called = (node.value.id, node.attr)
            is_let_in = id(node) in plain or name.parts[:2] in LIVE_PICKLES or name.as_posix() in TRUSTED
            if called in UNPICKLING and not is_let_in:
                yield f"{name}:{node.lineno}: {'.'.join(called)} executes what it reads"
    for number, line in enumerate(text.splitlines(), 1):
        for word in FORBIDDEN:
            if word in line:
                yield f"{name}:{number}: {word} is not used in this project"


def api_complaints(update: bool) -> Iterator[str]:
    folder = ROOT / "ci" / "api"
    folder.mkdir(exist_ok=True)
    packages = [
        path.name
        for base in [*sorted(ROOT.glob("packages/*/src")), ROOT / "testing" / "src"]
        for path in base.iterdir()
        if (path / "py.typed").exists()
    ]
    for package in packages:
        module = importlib.import_module(package)
        names = sorted(module.__all__)
        broken = [name for name in names if not hasattr(module, name)]
        if broken:
            yield f"{package}: {', '.join(broken)} in __all__ cannot be imported"
        record = folder / f"{package}.txt"
        text = "\n".join(names) + "\n"
        if update:
            record.write_text(text)
        elif not record.exists() or record.read_text() != text:
            before = set(record.read_text().split()) if record.exists() else set()
            yield f"{package}: public names changed ({sorted(before ^ set(names))}); run: hatch run house --update"


if __name__ == "__main__":
    update = "--update" in sys.argv
    complaints = [text for path in sources() for text in size_complaints(path)]
    trees = {path.relative_to(ROOT): ast.parse(path.read_text()) for path in sources()}
    complaints += private_complaints(trees)
    complaints += name_complaints(trees)
    complaints += api_complaints(update)
    print("\n".join(complaints) or "sizes and public names are as recorded")
    sys.exit(bool(complaints))

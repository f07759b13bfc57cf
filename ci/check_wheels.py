"""Builds every member's wheel and imports each in a bare environment holding only what it declares.

The layers for data and checkpoints also train in such environments, in loops that are not ours.

Members are installed by path, never by name (see check_origin.py). Third-party requirements (torch and the like) are
taken from the environment this script runs in, through a ``.pth`` file that lists the files of exactly the declared
distributions and what those declare in turn: an import of anything else fails as it would for a stranger.
"""

import subprocess
import sys
import tempfile
import tomllib
import venv
from importlib.metadata import distribution
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]
Members = dict[str, tuple[Path, dict[str, object]]]
"""By distribution name: its folder and the ``[project]`` table of its pyproject."""
OTHER_LOOPS: tuple[tuple[str, tuple[str, ...], str | None], ...] = (
    ("accel-data", ("torch",), None),
    ("accel-data", ("fabric",), "lightning-fabric"),
    ("accel-ckpt", (), None),
)
"""Members with a script that trains with them alone: its arguments, and the library that it needs besides."""


def projects() -> Members:
    files = [*sorted(ROOT.glob("packages/*/pyproject.toml")), ROOT / "testing" / "pyproject.toml"]
    tables = [(file.parent, tomllib.loads(file.read_text())["project"]) for file in files]
    return {str(table["name"]): (folder, table) for folder, table in tables}


def closure(names: list[str]) -> set[str]:
    """The distributions that ``names`` need, themselves included, as installed here."""
    seen: set[str] = set()
    todo = list(names)
    while todo:
        name = todo.pop()
        if name in seen:
            continue
        seen.add(name)
        for text in distribution(name).requires or ():
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                todo.append(requirement.name)
    return seen


def link(name: str, site: Path) -> None:
    """Makes one installed distribution importable from ``site`` without copying it."""
    files = distribution(name).files or ()
    base = Path(str(distribution(name).locate_file("")))
    for top in sorted({file.parts[0] for file in files if not file.parts[0].startswith(("..", "__pycache__"))}):
        target = site / top
        if not target.exists():
            target.symlink_to(base / top)


def members_needed(name: str, table: Members) -> list[str]:
    found = [name]
    for text in table[name][1]["dependencies"]:  # type: ignore[attr-defined]
        needed = Requirement(text).name
        if needed in table:
            found += [other for other in members_needed(needed, table) if other not in found]
    return found


def bare(name: str, table: Members, folder: Path, *, beside: str | None = None) -> Path:
    """The Python of a new environment in ``folder``: member ``name``, what it needs, and the library ``beside`` it."""
    venv.create(folder, with_pip=False, symlinks=True)
    site = next(folder.glob("lib/python*/site-packages"))
    needed = members_needed(name, table)
    outside = [Requirement(text).name for member in needed for text in table[member][1]["dependencies"]]  # type: ignore[attr-defined]
    outside += [beside] if beside else []
    for other in sorted(closure([requirement for requirement in outside if requirement not in table])):
        link(other, site)
    paths = [str(next(folder.parent.glob(f"wheels/{member.replace('-', '_')}-*.whl"))) for member in needed]
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(site), *paths], check=True
    )
    return folder / "bin" / "python"


def run(python: Path, *arguments: str) -> None:
    subprocess.run([str(python), "-I", "-W", "ignore", *arguments], check=True)


def check_import(name: str, table: Members, scratch: Path) -> None:
    module = next((table[name][0] / "src").glob("*/__init__.py")).parent.name
    code = f"import {module} as m; print('{name}', m.__version__, len([getattr(m, n) for n in m.__all__]), 'names')"
    run(bare(name, table, scratch / name), "-c", code)


def check_other_loops(table: Members, scratch: Path) -> None:
    """Layers alone, on one process and two, in plain loops of torch's and in one of Lightning Fabric's."""
    for number, (name, arguments, beside) in enumerate(OTHER_LOOPS):
        python = bare(name, table, scratch / f"loop{number}", beside=beside)
        run(python, str(ROOT / "packages" / name / "tests" / "other_loops.py"), *arguments)


def build(folders: list[Path], wheels: Path) -> None:
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(wheels)]
    for folder in folders:
        subprocess.run([*command, str(folder)], check=True)


if __name__ == "__main__":
    table = projects()
    with tempfile.TemporaryDirectory() as text:
        scratch = Path(text)
        build([folder for folder, _ in table.values()], scratch / "wheels")
        for name in table:
            check_import(name, table, scratch)
        check_other_loops(table, scratch)

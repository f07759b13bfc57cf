"""Builds every member's wheel and imports each in a bare environment holding only what it declares.

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


def projects() -> dict[str, tuple[Path, dict[str, object]]]:
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


def members_needed(name: str, table: dict[str, tuple[Path, dict[str, object]]]) -> list[str]:
    found = [name]
    for text in table[name][1]["dependencies"]:  # type: ignore[attr-defined]
        needed = Requirement(text).name
        if needed in table:
            found += [other for other in members_needed(needed, table) if other not in found]
    return found


def check(name: str, table: dict[str, tuple[Path, dict[str, object]]], wheels: Path, folder: Path) -> None:
    venv.create(folder, with_pip=False, symlinks=True)
    site = next(folder.glob("lib/python*/site-packages"))
    needed = members_needed(name, table)
    outside = [Requirement(text).name for member in needed for text in table[member][1]["dependencies"]]  # type: ignore[attr-defined]
    for other in sorted(closure([requirement for requirement in outside if requirement not in table])):
        link(other, site)
    paths = [str(next(wheels.glob(f"{member.replace('-', '_')}-*.whl"))) for member in needed]
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(site), *paths], check=True
    )
    module = name.replace("-", "_")
    code = f"import {module} as m; print('{name}', m.__version__, len([getattr(m, n) for n in m.__all__]), 'names')"
    subprocess.run([str(folder / "bin" / "python"), "-I", "-W", "ignore", "-c", code], check=True)


if __name__ == "__main__":
    table = projects()
    with tempfile.TemporaryDirectory() as scratch:
        wheels = Path(scratch) / "wheels"
        for folder, _ in table.values():
            subprocess.run(
                [
                    sys.executable,
                    "-m",
                    "pip",
                    "wheel",
                    "-q",
                    "--no-deps",
                    "--no-build-isolation",
                    "-w",
                    str(wheels),
                    str(folder),
                ],
                check=True,
            )
        for name in table:
            check(name, table, wheels, Path(scratch) / name)

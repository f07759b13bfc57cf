"""Runs a program in this process, and records at its end which modules of an installed Accelerate are loaded.

    watched.py ACCELERATE_FOLDER RECORD [-m] PROGRAM ARGUMENTS

Only the in-package tests, ``accelerate.test_utils``, come from the folder; accel-compat has no such modules.
"""

import atexit
import importlib.abc
import importlib.util
import json
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

TESTS = "accelerate.test_utils"


class TestsFinder(importlib.abc.MetaPathFinder):
    """Finder of the package of Accelerate's in-package tests in a folder."""

    __test__ = False

    def __init__(self, folder: Path) -> None:
        self.place = folder / "test_utils"

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        if fullname != TESTS:
            return None
        file = self.place / "__init__.py"
        return importlib.util.spec_from_file_location(fullname, file, submodule_search_locations=[str(self.place)])


def loaded_from(folder: Path) -> list[str]:
    """Loaded modules whose files are in ``folder``, without the in-package tests."""
    files = {name: getattr(module, "__file__", None) or "" for name, module in list(sys.modules.items())}
    tests = folder / "test_utils"
    inside = {name: Path(file) for name, file in files.items() if Path(file).is_relative_to(folder)}
    return [name for name, file in inside.items() if not file.is_relative_to(tests)]


def note(folder: Path, record: Path) -> None:
    """Appends one line about this process to ``record``."""
    with record.open("a") as file:
        file.write(json.dumps(loaded_from(folder)) + "\n")


def main() -> None:
    """Runs the program."""
    folder, record = Path(sys.argv[1]), Path(sys.argv[2])
    sys.meta_path.insert(0, TestsFinder(folder))
    atexit.register(note, folder, record)
    is_module = sys.argv[3] == "-m"
    sys.argv = sys.argv[4 if is_module else 3 :]
    if is_module:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(sys.argv[0]).parent))
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()

"""Check of scripts and folders."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

from accel_compat.migration.calls import Calls
from accel_compat.migration.findings import Finding, Kind, edited
from accel_compat.migration.imports import Imports
from accel_compat.migration.renaming import Renaming
from accel_compat.migration.source import ScriptSource
from accel_state.errors import ConfigError

_SKIPPED = frozenset(("__pycache__", "node_modules", "site-packages", "build", "dist"))


@final
@dataclass(slots=True)
class ScriptReport:
    """What was found in a script.

    Attributes:
        path: its file.
        findings: by line.
        renamed: whether its imports were renamed in the file.
        error: why it was not checked; empty if it was.
    """

    path: Path
    findings: list[Finding] = field(default_factory=list)
    renamed: bool = False
    error: str = ""

    def count(self, kind: Kind) -> int:
        """Number of findings of this kind."""
        return sum(one.kind == kind for one in self.findings)

    def document(self) -> dict[str, Any]:
        """The report as JSON."""
        findings = [one.document() for one in self.findings]
        return {"path": str(self.path), "findings": findings, "renamed": self.renamed, "error": self.error or None}


def check_script(path: Path, *, write: bool = False) -> ScriptReport:
    """Checks one script, which is read and not run; ``write`` renames its imports in the file."""
    try:
        source = ScriptSource(path)
        imports = Imports.of(source.tree)
        renaming, calls = Renaming(source, imports), Calls(source, imports)
        findings = sorted({*renaming.findings, *calls.findings})
        if write and renaming.edits:
            source.write(edited(source.utf8, renaming.edits))
    except (ConfigError, OSError) as error:
        return ScriptReport(path, error=str(error))
    return ScriptReport(path, findings, renamed=write and bool(renaming.edits))


def check_scripts(paths: Sequence[Path], *, write: bool = False) -> list[ScriptReport]:
    """Checks scripts, and all scripts in folders.

    Raises:
        ConfigError: a path does not exist, or a folder has no scripts.
    """
    return [check_script(path, write=write) for path in dict.fromkeys(one for path in paths for one in _scripts(path))]


def _scripts(path: Path) -> Iterator[Path]:
    if path.is_file():
        yield path
        return
    if not path.is_dir():
        raise ConfigError(f"{path} does not exist; expected a script or a folder of scripts")
    found = False
    for folder, names, files in os.walk(path):
        names[:] = sorted(name for name in names if name not in _SKIPPED and not name.startswith("."))
        for name in sorted(files):
            if name.endswith(".py"):
                found = True
                yield Path(folder) / name
    if not found:
        raise ConfigError(f"{path} has no files that end in .py; expected a script or a folder of scripts")

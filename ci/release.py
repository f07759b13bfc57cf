"""Builds the wheels of a release, checks each in a bare environment, and writes their digests and provenance.

    python ci/release.py dist

``dist`` then holds a wheel of each package, ``SHA256SUMS`` in the format of ``sha256sum --check``, and
``provenance.json``: the commit, whether the tree had changes, and the versions of the tools. Two builds of one commit
have equal digests, because the time in the archives is that of the commit. Nothing is signed here: a release signs
``SHA256SUMS`` with the key of the one who releases.
"""

import argparse
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from ci.check_wheels import build, check_import, check_other_loops, projects  # noqa: E402

TOOLS = ("hatchling", "pip", "torch")


def git(*arguments: str) -> str:
    """Output of a git command in the repository."""
    return subprocess.run(
        ["git", "-C", str(ROOT), *arguments], check=True, capture_output=True, text=True
    ).stdout.strip()


def digests(wheels: list[Path]) -> str:
    """Lines of ``SHA256SUMS``."""
    return "".join(f"{hashlib.sha256(wheel.read_bytes()).hexdigest()}  {wheel.name}\n" for wheel in sorted(wheels))


def provenance() -> dict[str, object]:
    """Facts from which a build can be repeated."""
    return {
        "commit": git("rev-parse", "HEAD"),
        "committed": git("log", "-1", "--format=%cI"),
        "changes": bool(git("status", "--porcelain")),
        "python": platform.python_version(),
        "tools": {name: version(name) for name in TOOLS},
        "command": "python ci/release.py",
    }


def release(target: Path, *, check: bool = True) -> list[Path]:
    """Writes the wheels of all packages, their digests and the provenance to ``target``, which must be new or empty.

    Raises:
        SystemExit: ``target`` holds files.
    """
    if target.exists() and any(target.iterdir()):
        sys.exit(f"{target} holds files; expected a new or empty folder")
    os.environ["SOURCE_DATE_EPOCH"] = git("log", "-1", "--format=%ct")
    table = projects()
    with tempfile.TemporaryDirectory() as text:
        scratch = Path(text)
        build([folder for folder, _ in table.values()], scratch / "wheels")
        if check:
            for name in table:
                check_import(name, table, scratch)
            check_other_loops(table, scratch)
        target.mkdir(parents=True, exist_ok=True)
        wheels = [Path(shutil.copy(wheel, target)) for wheel in sorted((scratch / "wheels").glob("*.whl"))]
    (target / "SHA256SUMS").write_text(digests(wheels), encoding="utf-8")
    (target / "provenance.json").write_text(json.dumps(provenance(), indent=1) + "\n", encoding="utf-8")
    return wheels


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("target", type=Path, help="a new or empty folder")
    options.add_argument("--no-check", action="store_true", help="only build")
    given = options.parse_args()
    for wheel in release(given.target, check=not given.no_check):
        print(wheel.name)
    return 0


if __name__ == "__main__":
    sys.exit(main())

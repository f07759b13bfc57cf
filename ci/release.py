"""Builds the wheels of a release, checks each in a bare environment, and signs their digests and provenance.

    python ci/release.py dist --key ~/.ssh/id_ed25519

``dist`` then holds a wheel of each package, ``provenance.json`` (an in-toto statement with the predicate of SLSA 1.0:
digests of the wheels, the commit, the versions of the tools), ``SHA256SUMS`` of both in the format of
``sha256sum --check``, and its signature by an SSH key, ``SHA256SUMS.sig``. Two builds of one commit have equal digests,
because the time in the archives is that of the commit. Without ``--key`` nothing is signed. The workflow
``release.yml`` builds the same wheels and publishes them with attestations (PEP 740) under the workflow's identity.

OpenSSH checks the signature against ``signers``, which has a line ``releases ssh-ed25519 AAAA...`` for each public key
that may sign::

    ssh-keygen -Y verify -f signers -I releases -n accel -s SHA256SUMS.sig < SHA256SUMS && sha256sum --check SHA256SUMS
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
NAMESPACE = "accel"
"""Namespace of signatures: one made for another purpose with the same key does not verify."""


def git(*arguments: str) -> str:
    """Output of a git command in the repository."""
    return subprocess.run(
        ["git", "-C", str(ROOT), *arguments], check=True, capture_output=True, text=True
    ).stdout.strip()


def sha256(file: Path) -> str:
    """SHA-256 of a file in hexadecimal."""
    return hashlib.sha256(file.read_bytes()).hexdigest()


def digests(files: list[Path]) -> str:
    """Lines of ``SHA256SUMS``."""
    return "".join(f"{sha256(file)}  {file.name}\n" for file in sorted(files))


def provenance(wheels: list[Path]) -> dict[str, object]:
    """Statement of what the wheels were built from (https://in-toto.io/Statement/v1, https://slsa.dev/provenance/v1)."""
    commit = git("rev-parse", "HEAD")
    return {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [{"name": wheel.name, "digest": {"sha256": sha256(wheel)}} for wheel in sorted(wheels)],
        "predicateType": "https://slsa.dev/provenance/v1",
        "predicate": {
            "buildDefinition": {
                "buildType": "python ci/release.py",
                "externalParameters": {"commit": commit, "uncommittedChanges": changed()},
                "internalParameters": {"committed": git("log", "-1", "--format=%cI")},
                "resolvedDependencies": [{"name": "source", "digest": {"gitCommit": commit}}],
            },
            "runDetails": {
                "builder": {
                    "id": os.environ.get("GITHUB_WORKFLOW_REF", "local"),
                    "version": {"python": platform.python_version(), **{name: version(name) for name in TOOLS}},
                }
            },
        },
    }


def changed() -> bool:
    """Whether the work tree differs from its commit."""
    return bool(git("status", "--porcelain"))


def sign(file: Path, key: Path) -> Path:
    """Writes the signature of ``file`` by an SSH key beside it."""
    subprocess.run(["ssh-keygen", "-q", "-Y", "sign", "-n", NAMESPACE, "-f", str(key), str(file)], check=True)
    return file.with_name(f"{file.name}.sig")


def release(target: Path, *, check: bool = True, key: Path | None = None) -> list[Path]:
    """Writes the wheels of all packages, their digests and the provenance to ``target``, which must be new or empty.

    With ``key``, the private SSH key of the one who releases, the digests are signed.

    Raises:
        SystemExit: ``target`` holds files; or a release is to be signed whose key is missing, or that a commit does not
            describe.
    """
    if target.exists() and any(target.iterdir()):
        sys.exit(f"{target} holds files; expected a new or empty folder")
    if key is not None and not key.is_file():
        sys.exit(f"no key at {key}; expected a private SSH key, as `ssh-keygen -t ed25519` makes one")
    if key is not None and changed():
        sys.exit("the work tree has uncommitted changes; the provenance names the commit alone: commit or drop them")
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
    statement, sums = target / "provenance.json", target / "SHA256SUMS"
    statement.write_text(json.dumps(provenance(wheels), indent=1) + "\n", encoding="utf-8")
    sums.write_text(digests([*wheels, statement]), encoding="utf-8")
    if key is not None:
        sign(sums, key)
    return wheels


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("target", type=Path, help="a new or empty folder")
    options.add_argument("--no-check", action="store_true", help="only build")
    options.add_argument("--key", type=Path, help="private SSH key that signs the digests")
    given = options.parse_args()
    for wheel in release(given.target, check=not given.no_check, key=given.key):
        print(wheel.name)
    return 0


if __name__ == "__main__":
    sys.exit(main())

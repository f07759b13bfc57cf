"""Packs what a GPU machine without network needs to run ``benchmarks.gpu``: wheels and a script, less than 60 MB.

    python ci/pack_gpu.py .gpu
    bash .gpu/run.sh OUT [options of benchmarks.gpu]

The machine has a torch of its own. Our wheels are for any Python from 3.11 on; those of others are for the Python that
``--python`` names. Both commands are run in the root of a checkout, which holds the driver and the tests.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MAX_BYTES = 60 * 10**6
MEMBERS = (*sorted(path.parent for path in ROOT.glob("packages/*/pyproject.toml")), ROOT / "testing")
# What accel needs besides torch and what its tests need; a machine that has one keeps its own.
NEEDED = (
    *("rich-click", "click>=8.4", "rich", "markdown-it-py", "mdurl", "pygments", "zlib-ng", "cloudpickle"),
    *("pytest>=8.4,<10", "pytest-timeout", "psutil", "pluggy", "iniconfig"),
)
MEASURED = ("torchao==0.18.0", "torchdata")
MEGATRON = "megatron-core==0.16.1"  # of the tests of accel-megatron; what it needs is on the machine
FOR_DEEPSPEED = (
    "hjson",
    "py-cpuinfo",
    "msgpack",
    "ninja",
    "einops",
    "pydantic",
    "annotated-types",
    "typing-inspection",
    "typing-extensions",
)
DEEPSPEED = "deepspeed==0.19.8"  # only a source distribution is published
PLATFORMS = ("any", "manylinux_2_28_x86_64", "manylinux_2_24_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")

RUN = """#!/bin/bash
# Installs what lies beside this script and runs the driver: bash .gpu/run.sh OUT [options of benchmarks.gpu]
set -u
here=$(cd "$(dirname "$0")" && pwd)
out=$1
shift
mkdir -p "$out"
python=${PYTHON:-python3}
export PIP_BREAK_SYSTEM_PACKAGES=1  # the Python of a distribution refuses otherwise
# With what each needs where that is here or on the machine, alone otherwise: the driver then says what is missing.
for name in accel-training accel-testing pytest-timeout torchao torchdata deepspeed megatron-core; do
  for alone in "" --no-deps; do
    $python -m pip install --no-index --find-links "$here" --disable-pip-version-check --quiet $alone $name \\
      >> "$out/install.txt" 2>&1 && continue 2
  done
  echo "$name was not installed, see $out/install.txt"
done
for wheel in "$here"/accel*.whl; do  # after an installation alone, the other packages are missing
  $python -m pip install --no-index --disable-pip-version-check --quiet --no-deps "$wheel" >> "$out/install.txt" 2>&1
done
$python -m benchmarks.gpu --out "$out" "$@"
"""


def pip(*arguments: str, **variables: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", *arguments], check=True, env={**os.environ, **variables})


def own_wheels(folder: Path, members: Sequence[Path] = MEMBERS) -> None:
    """Builds the wheels of this repository."""
    for member in members:
        pip("wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(folder), str(member))


def others_wheels(folder: Path, python: str, requirements: Sequence[str]) -> list[str]:
    """Downloads wheels for the machine's Python; returns the requirements that have none."""
    platforms = [f"--platform={platform}" for platform in PLATFORMS]
    # Constraints pin versions for this machine's torch, not for that one's.
    free = {"PIP_CONSTRAINT": os.devnull, "PIP_FIND_LINKS": ""}
    missing = []
    for requirement in requirements:
        chosen = ["--python-version", python, "--only-binary=:all:", "--no-deps", *platforms]
        try:
            pip("download", "-q", *chosen, "-d", str(folder), requirement, **free)
        except subprocess.CalledProcessError:
            missing.append(requirement)
    return missing


def pydantic_core(folder: Path) -> list[str]:
    """The exact version of pydantic-core that the packed pydantic needs."""
    for wheel in folder.glob("pydantic-*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            metadata = next(name for name in archive.namelist() if name.endswith("METADATA"))
            found = re.search(r"^Requires-Dist: (pydantic-core==\S+)", archive.read(metadata).decode(), re.MULTILINE)
        if found:
            return [found[1]]
    return []


def deepspeed_wheel(folder: Path) -> list[str]:
    """Builds DeepSpeed's wheel without its compiled operations, which need the machine's own compiler and torch."""
    try:
        pip("wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(folder), DEEPSPEED, DS_BUILD_OPS="0")
    except subprocess.CalledProcessError:
        return [DEEPSPEED]
    return []


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def pack(folder: Path, python: str, *, ours_only: bool = False) -> list[str]:
    """Fills ``folder`` anew; returns the requirements that could not be packed.

    Raises:
        SystemExit: the folder is larger than the machine accepts.
    """
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    own_wheels(folder)
    missing = [] if ours_only else others_wheels(folder, python, [*NEEDED, *MEASURED, MEGATRON, *FOR_DEEPSPEED])
    if not ours_only:
        missing += others_wheels(folder, python, pydantic_core(folder)) + deepspeed_wheel(folder)
    (folder / "run.sh").write_text(RUN, encoding="utf-8")
    if (size := size_of(folder)) > MAX_BYTES:
        largest = max(folder.iterdir(), key=lambda path: path.stat().st_size)
        sys.exit(f"{folder} has {size / 1e6:.0f} MB, at most {MAX_BYTES / 1e6:.0f}; the largest file is {largest.name}")
    return missing


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("folder", type=Path, nargs="?", default=ROOT / ".gpu")
    options.add_argument("--python", default="3.12", help="version of the machine's Python; 3.12")
    options.add_argument("--ours-only", action="store_true", help="only the wheels of this repository")
    args = options.parse_args()
    missing = pack(args.folder, args.python, ours_only=args.ours_only)
    for path in sorted(args.folder.iterdir()):
        print(f"{path.stat().st_size / 1e6:7.2f} MB  {path.name}")
    print(f"{size_of(args.folder) / 1e6:7.2f} MB  in all")
    if missing:
        print("without a wheel:", ", ".join(missing))


if __name__ == "__main__":
    main()

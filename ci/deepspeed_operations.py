"""Compiles DeepSpeed's operations for CPUs once, into TORCH_EXTENSIONS_DIR, where tests find them.

What was built for other versions or another processor is thrown away, and so are locks of builds that were killed: for
those every later build would wait for ever. Without DeepSpeed or a compiler it says so and succeeds; the tests that
need an operation are skipped then. ``--disk`` also builds what states on NVMe need, where libaio is installed.
"""

import hashlib
import os
import platform
import shutil
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

OPERATIONS = ("CPUAdamBuilder",)
# Minutes more, and libaio; with the argument --disk.
DISK = ("AsyncIOBuilder",)


def key() -> str:
    """What the compiled code depends on: versions, compiler and the processor's instructions."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    flags = sorted(next((line for line in lines if line.startswith("flags")), "").split())
    compiler = os.path.realpath(shutil.which("g++") or shutil.which("c++") or "")
    parts = (version("torch"), version("deepspeed"), platform.python_version(), compiler, " ".join(flags))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def main() -> int:
    """Builds what is missing."""
    folder = Path(os.environ.get("TORCH_EXTENSIONS_DIR", ""))
    if not folder.name:
        print("TORCH_EXTENSIONS_DIR is not set; expected the folder to build into")
        return 1
    try:
        wanted = key()
    except PackageNotFoundError as error:
        print(f"nothing to build: {error} is not installed")
        return 0
    from accel_deepspeed.library import build_operation, compiler_problem, own_ninja

    with own_ninja():
        problem = compiler_problem()
    if problem is not None:
        print(f"nothing is built: {problem}")
        return 0
    stamp = folder / "key"
    if not stamp.exists() or stamp.read_text() != wanted:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        stamp.write_text(wanted)
    for lock in folder.glob("*/lock"):
        lock.unlink()
    for name in (*OPERATIONS, *(DISK if "--disk" in sys.argv[1:] else ())):
        build_operation(name)
        print(f"{name} is built")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Runs tests as users run scripts: under real launchers, on the wheels of every member, with random hash seeds.

The wheels lie in an environment of their own, above the libraries of the one that this script runs in; its editable
members are not visible there. Arguments are passed to pytest.
"""

import os
import subprocess
import sys
import sysconfig
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = ("launched",)
# Tests of ranks, so many of each package, in ranks that the launchers start. These outlive a test.
SAMPLE = ("--sample=8", "-o", "accel_leaks=environment groups threads", "packages", "testing")
# pytest's exit status where nothing was selected, as when failures of another run are repeated.
_NOTHING_SELECTED = 5


def members() -> list[Path]:
    """The folders of all distributions of the workspace."""
    return [*(file.parent for file in sorted(ROOT.glob("packages/*/pyproject.toml"))), ROOT / "testing"]


def layered(folder: Path) -> Path:
    """The Python of a new environment: the members' wheels above the libraries of this one."""
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    wheels = folder / "wheels"
    pip = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check"]
    build = [*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", str(wheels), *map(str, members())]
    subprocess.run(build, check=True)
    install = [*pip, "--python", str(python), "install", "--no-deps", *map(str, sorted(wheels.glob("*.whl")))]
    subprocess.run(install, check=True)
    # A path in a .pth file is searched, but the .pth files that lie there, those of editable members, are not read.
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    return python


def main(arguments: list[str]) -> int:
    """Runs the scripts, then the sample under each launcher; the highest exit status."""
    with tempfile.TemporaryDirectory(prefix="accel-launched-") as folder:
        python = layered(Path(folder) / "environment")
        env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        env["PATH"] = os.pathsep.join([str(python.parent), env.get("PATH", "")])
        pytest = [str(python), "-m", "pytest", "-n", "2", "--dist", "worksteal", "--hash-seed=random", *arguments]
        runs = [SCRIPTS, *(("-m", "not slow", f"--launcher={name}", *SAMPLE) for name in ("accel", "torchrun"))]
        statuses = [subprocess.run([*pytest, *run], cwd=ROOT, env=env).returncode for run in runs]
        return max(
            status for status in (0, *statuses) if "--last-failed" not in arguments or status != _NOTHING_SELECTED
        )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

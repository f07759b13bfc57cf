"""Runs tests as users run scripts: under real launchers, on the wheels of every member, with random hash seeds.

The wheels lie in an environment of their own, above the libraries of the one that this script runs in; its editable
members are not visible there. Each page and example runs under one launcher, which the hash seed chooses; with
``--both-launchers``, as each night, under both. Other arguments are passed to pytest.
"""

import os
import secrets
import subprocess
import sys
import sysconfig
import tempfile
import venv
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CACHE = ROOT / ".cache" / "launched"
# Tests of ranks, so many of each package, in ranks that the launchers start. These outlive a test.
SAMPLE = ("-m", "not slow", "--sample=6", "-o", "accel_leaks=environment groups threads", "packages", "testing")
_BOTH = "--both-launchers"
#: The runs of pytest, by name.
RUNS = {
    "scripts": ("launched", "-m", "not slow"),
    "accel": ("--launcher=accel", *SAMPLE),
    "torchrun": ("--launcher=torchrun", *SAMPLE),
}
# pytest's exit status where nothing was selected: a repetition of a run that had no failures.
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


def hash_seed(cache: Path, *, repeating: bool) -> str:
    """A number for the hash seeds of all runs: a new one, or that of the runs which are repeated."""
    file = cache / "hash_seed"
    if not (repeating and file.exists()):
        cache.mkdir(parents=True, exist_ok=True)
        file.write_text(str(secrets.randbelow(1_000_000)), encoding="utf-8")
    return file.read_text(encoding="utf-8")


def in_turn(scripts: Iterable[str], launchers: Iterable[str], seed: int) -> list[tuple[str, str, bool]]:
    """Each script with each launcher, and whether the seed chooses that launcher: one for each script.

    Seeds that differ by one choose other launchers for all scripts, and neighbours have different ones.
    """
    names = list(launchers)
    return [
        (script, name, (number + place + seed) % len(names) == 0)
        for number, script in enumerate(scripts)
        for place, name in enumerate(names)
    ]


def outcome(statuses: Iterable[int], *, repeating: bool) -> int:
    """The exit status of all runs together: the first that is no success, negative where a signal ended pytest."""
    successes = (0, _NOTHING_SELECTED) if repeating else (0,)
    return next((status for status in statuses if status not in successes), 0)


def main(arguments: list[str]) -> int:
    """Runs the scripts, then the sample under each launcher."""
    repeating = "--last-failed" in arguments
    runs = RUNS | {"scripts": ("launched",)} if _BOTH in arguments else RUNS
    passed = [argument for argument in arguments if argument != _BOTH]
    seed = hash_seed(CACHE, repeating=repeating)
    with tempfile.TemporaryDirectory(prefix="accel-launched-") as folder:
        python = layered(Path(folder) / "environment")
        env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        env["PATH"] = os.pathsep.join([str(python.parent), env.get("PATH", "")])
        pytest = [str(python), "-m", "pytest", "-n", "2", "--dist", "worksteal"]
        pytest += ["--programs=exec", f"--hash-seed={seed}", *passed]
        statuses = []
        for name, selection in runs.items():
            # Each run remembers its own failures: the same test may fail under one launcher and pass under the other.
            command = [*pytest, "-o", f"cache_dir={CACHE / name}", *selection]
            statuses.append(subprocess.run(command, cwd=ROOT, env=env).returncode)
    return outcome(statuses, repeating=repeating)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

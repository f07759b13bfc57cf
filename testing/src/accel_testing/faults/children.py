"""Tracking of processes and files that a test's programs leave behind, at any depth of descent."""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Collection
from pathlib import Path

VARIABLE = "ACCEL_TESTING_OFFSPRING"
"""Variable, in the environment of every program that a test starts, that names the test process and its folder."""

_HELPERS = ("resource_tracker", "forkserver", "accel_testing.ranks.fork_server")


def mark() -> None:
    """Marks the programs that this process starts from now on, and gives them their own temporary folder; idempotent.

    Compilers keep their cache where it was, because it is meant to persist.
    """
    if is_marking():
        return
    usual = tempfile.gettempdir()  # called first, so that this process keeps its own folder
    folder = tempfile.mkdtemp(prefix="accel_testing_offspring_")
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{usual}/torchinductor_{os.getuid()}")
    os.environ[VARIABLE] = f"{os.getpid()}:{folder}"
    os.environ["TMPDIR"] = folder


def unmark() -> None:
    """Removes the folder; only in the process that called ``mark``."""
    folder = _folder()
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)


def is_marking() -> bool:
    """Whether this is the process that called ``mark``."""
    return _folder() is not None


def files() -> list[Path]:
    """Files in the temporary folder of the marked programs; empty in other processes than the marking one."""
    folder = _folder()
    return [] if folder is None or not folder.is_dir() else sorted(folder.iterdir())


def sweep(before: Collection[Path]) -> None:
    """Removes files created since ``before``, because killed processes cannot remove them themselves.

    A folder with a listening socket belongs to a running process and is kept.
    """
    new = [path for path in files() if path not in before]
    sockets = _read_text("/proc/net/unix") if new else ""
    for path in new:
        if path.is_dir() and f"{path}/" not in sockets:
            shutil.rmtree(path, ignore_errors=True)
        elif not path.is_dir():
            path.unlink(missing_ok=True)


def numbers() -> list[str]:
    """Ids of all processes of the machine (on Linux), in the marking process; empty in others."""
    if not is_marking() or not os.path.isdir("/proc"):
        return []
    return [entry for entry in os.listdir("/proc") if entry.isdecimal()]


def command_of(pid: str) -> str | None:
    """Command of a marked process; None for others, and for helpers that live as long as the marking process."""
    wanted = f"{VARIABLE}={os.environ[VARIABLE]}".encode()
    with contextlib.suppress(OSError):
        if wanted in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            command = Path(f"/proc/{pid}/cmdline").read_text(errors="replace").replace("\0", " ").strip()
            return None if not command or any(helper in command for helper in _HELPERS) else command
    return None


def _read_text(path: str) -> str:
    with contextlib.suppress(OSError):
        return Path(path).read_text(errors="replace")
    return ""


def _folder() -> Path | None:
    owner, _, folder = os.environ.get(VARIABLE, "").partition(":")
    return Path(folder) if owner == str(os.getpid()) else None

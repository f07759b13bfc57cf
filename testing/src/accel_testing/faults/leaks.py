"""Leak checks of a test: variables, groups, threads, processes, ports, shared memory, files."""

import contextlib
import gc
import os
import socket
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from accel_testing.faults import children as offspring

if TYPE_CHECKING:
    import pytest

# Threads that libraries start once and keep on purpose, so that the first test that uses them is not blamed.
_KEPT_THREADS = ("pydevd", "execnet", "asyncio_", "fsspecIO", "QueueFeeder", "tqdm_monitor", "ThreadPoolExecutor-loky")
# Of the ranks and of the fork server of programs, which the first test that needs them starts.
_KEPT_FOLDERS = ("accel-ranks-", "accel-programs-")
# multiprocessing's folders: the readers of a loader end unfinished workers by a signal, so the workers cannot remove
# them; they are removed with the folder of all programs. torchrun keeps its logs by design.
_KEPT_BY_PROGRAMS = ("pymp-", "torchelastic_")
_KEPT_VARIABLES = ("PYTEST_CURRENT_TEST", "COV_CORE", "TORCHINDUCTOR_CACHE_DIR", "TRITON_", "KMP_", "PYTEST_XDIST")
_GRACE = 1.0
_BEFORE_COLLECTING = 0.2
_MAY_END = ("thread ", "child process ", "process ", "port ", "shared memory ", "temporary ")


@dataclass(frozen=True, slots=True)
class ProcessSnapshot:
    """Resources at one moment: for each check, their names and descriptions."""

    seen: Mapping[str, Mapping[str, str]]


def snapshot(checks: Iterable[str] = ()) -> ProcessSnapshot:
    """Takes a snapshot for the named checks (see ``CHECKS``); each takes less than a millisecond."""
    return ProcessSnapshot({name: CHECKS[name]() for name in checks})


def differences(before: ProcessSnapshot, after: ProcessSnapshot, *, group_expected: bool = False) -> list[str]:
    """One sentence for each resource in ``after`` that was not, or was different, in ``before``.

    ``group_expected``: the default process group belongs to the caller of the test.
    """
    found = [text for name in after.seen for text in _compare(name, before.seen[name], after.seen[name])]
    return [text for text in found if not (group_expected and text.startswith("the default process group"))]


def settled_differences(before: ProcessSnapshot, *, group_expected: bool = False, grace: float = _GRACE) -> list[str]:
    """Differences from ``before`` to now, after up to ``grace`` seconds in which threads and children may still end.

    Resources of unreachable objects, such as those of a traceback, are released by a garbage collection meanwhile.
    """
    begin, collected = time.monotonic(), False
    while True:
        found = differences(before, snapshot(before.seen), group_expected=group_expected)
        waited = time.monotonic() - begin
        if not any(text.startswith(_MAY_END) for text in found) or (waited > grace and collected):
            return found
        if waited > min(grace, _BEFORE_COLLECTING) and not collected:
            gc.collect()
            collected = True
        time.sleep(0.02)


def leak_checks(item: "pytest.Item") -> tuple[str, ...]:
    """Checks of a test: those of its marker ``leaks``, otherwise those of the ini option ``accel_leaks``.

    Temporary files of a process that is killed on purpose (marker ``fault``) are not leaks.
    """
    marker = item.get_closest_marker("leaks")
    checks = parse_checks((marker.args or ("all",)) if marker else item.config.getini("accel_leaks"))
    return tuple(name for name in checks if name != "temporary" or not item.get_closest_marker("fault"))


def parse_checks(words: Iterable[str]) -> tuple[str, ...]:
    """Parses names of checks, ``all`` meaning every check; an unknown name is refused."""
    wanted: list[str] = []
    for word in words:
        if word != "all" and word not in CHECKS:
            raise ValueError(f"no leak check {word!r}; there are: all, {', '.join(CHECKS)}")
        wanted += CHECKS if word == "all" else [word]
    return tuple(dict.fromkeys(wanted))


def _compare(check: str, before: Mapping[str, str], after: Mapping[str, str]) -> Iterator[str]:
    for name, look in after.items():
        if name not in before:
            if check == "processes" and not (look := (offspring.command_of(name) or "")[:200]):
                continue
            yield _SENTENCES[check].format(name=name, look=look)
        elif before[name] != look:
            yield f"{_SENTENCES[check].format(name=name, look=look)} (was {before[name]})"
    if check == "environment":
        for name in sorted(before.keys() - after.keys()):
            yield f"environment variable {name} was removed"


def _environment() -> dict[str, str]:
    return {name: repr(value) for name, value in os.environ.items() if not name.startswith(_KEPT_VARIABLES)}


def _groups() -> dict[str, str]:
    # No group exists before torch.distributed is imported, and this check must not import it.
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return {}
    return {"the default process group": f"{dist.get_backend()}, {dist.get_world_size()} ranks"}


def _threads() -> dict[str, str]:
    return {
        f"{thread.name} ({thread.ident})": "daemon" if thread.daemon else "not daemon, so the process waits for it"
        for thread in threading.enumerate()
        if thread is not threading.main_thread()
        and not isinstance(thread, threading._DummyThread)
        and not thread.name.startswith(_KEPT_THREADS)
    }


def _children() -> dict[str, str]:
    task = Path(f"/proc/{os.getpid()}/task")
    if not task.is_dir():
        return {}
    pids = [pid for entry in sorted(task.iterdir()) for pid in _read(entry / "children").split()]
    return {pid: _command(pid) for pid in pids if not _is_helper(pid)}


def _is_helper(pid: str) -> bool:
    """Whether a child is a helper that multiprocessing keeps as long as the process, or a fork server."""
    command = _command(pid)
    return any(word in command for word in ("resource_tracker", "forkserver", "accel_testing.ranks.fork_server"))


def _command(pid: str) -> str:
    return _read(Path(f"/proc/{pid}/cmdline")).replace("\0", " ").strip()[:200] or "a process that has ended"


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _shared_memory() -> dict[str, str]:
    """Shared memory of this process: torch's names include its pid, Python's segments are known while mapped."""
    folder = Path("/dev/shm")
    if not folder.is_dir():
        return {}
    names = sorted(os.listdir(folder))
    # /proc/self/maps is long once torch is loaded; it is read only if there is a candidate segment.
    mapped = _read(Path("/proc/self/maps")) if any(name.startswith("psm_") for name in names) else ""
    mark = f"_{os.getpid()}_"
    return {
        name: "shared memory"
        for name in names
        if mark in name or (name.startswith("psm_") and f"{folder}/{name}" in mapped)
    }


def _temporary() -> dict[str, str]:
    of_programs = [str(path) for path in offspring.files() if not path.name.startswith(_KEPT_BY_PROGRAMS)]
    paths = [*_made_here(), *of_programs]
    return {path: "a folder" if os.path.isdir(path) else "a file" for path in paths if os.path.lexists(path)}


def _processes() -> dict[str, str]:
    """All processes; only those that are new are checked for the mark, because that takes longer."""
    return dict.fromkeys(offspring.numbers(), "")


def _ports() -> dict[str, str]:
    """Ports on which this process listens. Programs' ports close with them; ranks' ports belong to the pool.

    Queries each socket, because the kernel's table of all connections takes many milliseconds to read.
    """
    if not offspring.is_marking() or not os.path.isdir("/proc/self/fd"):
        return {}
    ports = {}
    for entry in sorted(os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(os.fstat(int(entry)).st_mode) and (port := _port_of(int(entry))):
                ports[str(port)] = "listening"
    return ports


def _port_of(descriptor: int) -> int | None:
    """Port on which a socket listens; None for other sockets."""
    with socket.socket(fileno=os.dup(descriptor)) as same:
        if same.family not in (socket.AF_INET, socket.AF_INET6):
            return None
        if not same.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            return None
        port: int = same.getsockname()[1]
        return port


@cache
def _made_here() -> list[str]:
    """List to which ``tempfile``'s paths of this process are appended from now on; other processes share its folder."""
    made: list[str] = []

    def watch(event: str, arguments: tuple[object, ...]) -> None:
        if event not in ("tempfile.mkdtemp", "tempfile.mkstemp"):
            return
        path = str(arguments[0])
        # A library's files made during its import last as long as the process, which then removes them.
        if not os.path.basename(path).startswith(_KEPT_FOLDERS) and not _importing():
            made.append(path)

    sys.addaudithook(watch)
    return made


def _importing() -> bool:
    frame: FrameType | None = sys._getframe()
    while frame is not None and not frame.f_code.co_filename.startswith("<frozen importlib"):
        frame = frame.f_back
    return frame is not None


#: Checks by name. Each considers only this process and its descendants, because tests may run concurrently.
CHECKS: Mapping[str, Callable[[], dict[str, str]]] = {
    "environment": _environment,
    "groups": _groups,
    "threads": _threads,
    "children": _children,
    "processes": _processes,
    "ports": _ports,
    "shared_memory": _shared_memory,
    "temporary": _temporary,
}

#: Checks of resources that outlive this process, or that block other processes.
LASTING = ("processes", "ports", "shared_memory", "temporary")

_SENTENCES: Mapping[str, str] = {
    "environment": "environment variable {name} is {look}",
    "groups": "{name} is still open ({look})",
    "threads": "thread {name} still runs ({look})",
    "children": "child process {name} still runs: {look}",
    "processes": "process {name} still runs: {look}",
    "ports": "port {name} is still open",
    "shared_memory": "shared memory segment {name} still exists",
    "temporary": "temporary {name} ({look}) is still there",
}

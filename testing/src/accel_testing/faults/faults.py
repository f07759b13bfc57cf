"""Real faults at a chosen place: a process killed, stopped, delayed or failing inside a named function; broken files.

No fault is simulated: the process is killed by SIGKILL, the file system refuses to grow the file. A place is a
function, ``module:qualname``, so the code under test needs no hooks. For a script in its own process::

    python -m accel_testing.faults.faults 'kill at os:replace' script.py --its --arguments
"""

import ctypes
import errno
import functools
import importlib
import os
import random
import re
import resource
import runpy
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_MS_RDONLY, _MS_REMOUNT, _MNT_DETACH = 1, 32, 2  # constants of Linux's mount(2) and umount2(2)
_TEXT = re.compile(
    r"(?P<action>[a-z]+)(?:\((?P<value>[^)]*)\))?\s+(?P<when>at|before|after)\s+(?:call\s+(?P<call>\d+)\s+of\s+)?"
    r"(?P<place>[\w.]+:[\w.]+)(?:\s+on\s+rank\s+(?P<rank>\d+))?"
)


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault: ``action`` with its ``value``, the function, the number of the call, and the rank.

    Actions: ``kill`` (SIGKILL), ``stop`` (SIGSTOP), ``exit`` (value: status), ``delay`` (value: seconds), ``raise``
    (value: a name from ``errno``, default ENOSPC; raises that OSError). ``rank`` None means every rank.
    """

    action: str
    place: str
    value: str = ""
    call: int = 1
    after: bool = False
    rank: int | None = None

    def __post_init__(self) -> None:
        if self.action not in _ACTIONS:
            raise ValueError(f"no fault {self.action!r}; there are: {', '.join(_ACTIONS)}")
        if not re.fullmatch(r"[\w.]+:[\w.]+", self.place):
            raise ValueError(f"{self.place!r} is not a place; expected module:function, as in os:replace")

    @classmethod
    def parse(cls, text: str) -> "Fault":
        """Parses ``kill at os:replace`` or ``raise(EIO) after call 3 of os:fsync on rank 1``."""
        found = _TEXT.fullmatch(text.strip())
        if found is None:
            raise ValueError(
                f"{text!r} is not a fault; expected ACTION[(VALUE)] at|before|after [call N of] MODULE:FUNCTION "
                "[on rank R], as in: kill before call 2 of os:replace on rank 1"
            )
        return cls(
            found["action"],
            found["place"],
            value=found["value"] or "",
            call=int(found["call"] or 1),
            after=found["when"] == "after",
            rank=None if found["rank"] is None else int(found["rank"]),
        )


@contextmanager
def injected(fault: Fault | str, *, rank: int | None = None) -> Iterator[None]:
    """Installs the fault within the block, by wrapping its function. ``rank`` is this process's."""
    fault = Fault.parse(fault) if isinstance(fault, str) else fault
    owner, name = _find(fault.place)
    original = getattr(owner, name)
    here = int(os.environ.get("RANK", 0)) if rank is None else rank
    if fault.rank is not None and fault.rank != here:
        yield
        return
    setattr(owner, name, _wrap(original, fault))
    try:
        yield
    finally:
        setattr(owner, name, original)


def _wrap(original: Callable[..., Any], fault: Fault) -> Callable[..., Any]:
    calls = 0

    @functools.wraps(original)
    def faulty(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls != fault.call:
            return original(*args, **kwargs)
        if not fault.after:
            _ACTIONS[fault.action](fault.value)
            return original(*args, **kwargs)
        result = original(*args, **kwargs)
        _ACTIONS[fault.action](fault.value)
        return result

    return faulty


def _find(place: str) -> tuple[Any, str]:
    module, _, qualname = place.partition(":")
    *owners, name = qualname.split(".")
    owner: Any = importlib.import_module(module)
    for part in owners:
        owner = getattr(owner, part)
    if not callable(getattr(owner, name, None)):
        raise ValueError(f"{place!r}: {getattr(owner, '__name__', owner)} has no function {name!r}")
    return owner, name


def _kill(_value: str) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _stop(_value: str) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _exit(value: str) -> None:
    os._exit(int(value or 1))


def _delay(value: str) -> None:
    time.sleep(float(value or 1))


def _raise(value: str) -> None:
    number = getattr(errno, value or "ENOSPC")
    raise OSError(number, os.strerror(number))


_ACTIONS: dict[str, Callable[[str], None]] = {
    "kill": _kill,
    "stop": _stop,
    "exit": _exit,
    "delay": _delay,
    "raise": _raise,
}


@contextmanager
def limited_file_size(size: int) -> Iterator[None]:
    """Limits files to ``size`` bytes within the block: further writes raise ``OSError`` (EFBIG), as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    # Python ignores SIGXFSZ, by which the limit would otherwise kill the process.
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextmanager
def many_open_files(count: int = 1100) -> Iterator[None]:
    """Keeps ``count`` files open within the block: ``select.select`` refuses new descriptors, from 1024 on."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2 * count), hard))
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(count)]
    try:
        yield
    finally:
        for file in files:
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@contextmanager
def small_file_system(folder: str | os.PathLike[str], *, size: int = 2**20) -> Iterator[None]:
    """Mounts a file system of ``size`` bytes in memory at ``folder``; unmounts it, with its contents, afterwards.

    Raises:
        PermissionError: this process may not mount, which requires root.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    place = os.fsencode(folder)
    if os.geteuid() != 0 or libc.mount(b"tmpfs", place, b"tmpfs", 0, f"size={size}".encode()) != 0:
        raise PermissionError(f"no file system can be mounted at {os.fspath(folder)}; it needs root")
    try:
        yield
    finally:
        libc.umount2(place, _MNT_DETACH)


def make_read_only(folder: str | os.PathLike[str]) -> None:
    """Makes a ``small_file_system`` read-only, for root too.

    Raises:
        OSError: nothing is mounted there, or a file is open for writing.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(None, os.fsencode(folder), None, _MS_RDONLY | _MS_REMOUNT, None) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), os.fspath(folder))


def corrupt_file(path: str | os.PathLike[str], *, position: int | None = None, seed: int = 0) -> int:
    """Flips one bit, keeping size and times; returns the byte's position, drawn by ``seed`` unless it is given."""
    file = Path(path)
    data, status = bytearray(file.read_bytes()), file.stat()
    if not data:
        raise ValueError(f"{file} is empty; there is nothing to corrupt")
    where = random.Random(seed).randrange(len(data)) if position is None else position % len(data)
    data[where] ^= 0x10
    file.write_bytes(data)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    return where


def truncate_file(path: str | os.PathLike[str], *, keep: int | float = 0.5) -> int:
    """Truncates a file to ``keep`` bytes, or to that fraction of its size; returns the new size."""
    size = Path(path).stat().st_size
    kept = int(size * keep) if isinstance(keep, float) else keep
    if not 0 <= kept <= size:
        raise ValueError(f"keep={keep} of a file of {size} bytes; expected 0 to {size} bytes or a fraction of 1")
    os.truncate(path, kept)
    return kept


def main(arguments: list[str]) -> None:
    """Runs a script with a fault installed, as ``python script.py ...`` would run it."""
    if len(arguments) < 2:
        raise SystemExit("usage: python -m accel_testing.faults.faults FAULT SCRIPT [ARGUMENTS]")
    fault, script, *rest = arguments
    sys.argv = [script, *rest]
    sys.path.insert(0, str(Path(script).resolve().parent))
    with injected(fault):
        runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])

"""Stacks of a hung rank: the signal that makes it write them, and the user's line in them."""

import re
import signal
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_FRAME = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+) in (?P<name>.*)')
_THREAD = re.compile(r"(?:Current thread|Thread) (?P<ident>0x[0-9a-f]+)")


@dataclass(frozen=True, slots=True)
class Frame:
    """One frame of a stack."""

    file: str
    line: int
    name: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.name}"


def main_thread(dump: str) -> list[Frame]:
    """The frames of a dump's main thread, innermost first; the dump's first line is that thread's identity."""
    header, _, text = dump.partition("\n")
    frames: dict[int, list[Frame]] = {}
    current: list[Frame] = []
    for line in text.splitlines():
        if found := _THREAD.match(line):
            current = []
            frames[int(found["ident"], 16)] = current
        elif found := _FRAME.match(line):
            current.append(Frame(found["file"], int(found["line"]), found["name"]))
    try:
        return frames.get(int(header, 16), [])
    except ValueError:
        return []


def user_frame(frames: list[Frame]) -> Frame | None:
    """The innermost frame outside of Python, installed packages and this harness."""
    return next((frame for frame in frames if not _is_library(frame.file)), None)


def _is_library(file: str) -> bool:
    return file.startswith("<") or any(file.startswith(folder) for folder in _library_folders())


def _library_folders() -> Iterator[str]:
    for key in ("stdlib", "platstdlib", "purelib", "platlib"):
        yield sysconfig.get_paths()[key] + "/"
    yield f"{sys.base_prefix}/lib/"
    yield str(Path(__file__).parents[1]) + "/"


def describe_place(dump: str) -> str:
    """Position of a rank's main thread: the user's line, and the function in which it waits."""
    frames = main_thread(dump)
    if not frames:
        return "at an unknown place (no stack could be read)"
    mine = user_frame(frames)
    if mine is None:
        return f"at {frames[0]}"
    inside = "" if frames[0] == mine else f", inside {frames[0].name} ({Path(frames[0].file).name}:{frames[0].line})"
    return f"at {mine}{inside}"


# Not SIGUSR1, which tests of preemption use.
DUMP_STACKS: int = signal.SIGRTMIN + 9 if sys.platform == "linux" else signal.SIGUSR2


def describe_exit(status: int | None) -> str:
    """Describes an exit status in Python's convention (negative: a signal)."""
    if status is None:
        return "ended in an unknown way"
    if status >= 0:
        return f"ended with exit status {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = "signal"
    return f"was killed by {name} ({-status})"

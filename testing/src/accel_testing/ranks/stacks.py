"""Stacks of a hanging rank: the signal that makes it write them, and the line of the user's code in them."""

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
    """One line of a stack."""

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
    """The innermost frame that is neither Python's, nor an installed package's, nor this harness's."""
    return next((frame for frame in frames if not _is_library(frame.file)), None)


def _is_library(file: str) -> bool:
    return file.startswith("<") or any(file.startswith(folder) for folder in _library_folders())


def _library_folders() -> Iterator[str]:
    for key in ("stdlib", "platstdlib", "purelib", "platlib"):
        yield sysconfig.get_paths()[key] + "/"
    yield f"{sys.base_prefix}/lib/"
    yield str(Path(__file__).parents[1]) + "/"


def describe_place(dump: str) -> str:
    """Where the main thread of a rank stands: the user's line, and what that line is waiting in."""
    frames = main_thread(dump)
    if not frames:
        return "at an unknown place (no stack could be read)"
    mine = user_frame(frames)
    if mine is None:
        return f"at {frames[0]}"
    inside = "" if frames[0] == mine else f", inside {frames[0].name} ({Path(frames[0].file).name}:{frames[0].line})"
    return f"at {mine}{inside}"


# Not SIGUSR1: tests of preemption use it.
DUMP_STACKS: int = signal.SIGRTMIN + 9 if sys.platform == "linux" else signal.SIGUSR2


def describe_exit(status: int | None) -> str:
    """What an exit status in Python's convention (negative: a signal) says."""
    if status is None:
        return "ended in an unknown way"
    if status >= 0:
        return f"ended with exit status {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = "signal"
    return f"was killed by {name} ({-status})"

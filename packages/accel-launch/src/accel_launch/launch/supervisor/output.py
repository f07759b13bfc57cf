"""Output of the processes: inherited, or copied by the launcher with the rank before each line."""

import contextlib
import os
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from subprocess import PIPE
from typing import BinaryIO, final

from accel_state.errors import LaunchError

_CHUNK = 65536
_COLOURS = (36, 33, 32, 35, 34, 31, 96, 93, 92, 95, 94, 91)


@final
class Output:
    """Copies the output of one attempt's processes to the launcher's own streams and to one file for each rank.

    Used only for a prefix or files; otherwise the processes write to the launcher's streams directly, and progress bars
    still see a terminal. ``tee`` selects streams as torchrun does: 1 stdout, 2 stderr, 3 both, for all processes or by
    local rank. Selected streams get the prefix, and if any are selected, only these are copied. ``role`` precedes the
    rank. On a terminal each rank has a colour.

    Raises:
        LaunchError: ``folder`` cannot be created.
    """

    def __init__(self, *, prefix: bool, folder: Path | None, tee: str = "0", role: str = "") -> None:
        self._prefix = prefix or tee != "0"
        self._tee = tee
        self._role = role
        self._folder = folder
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._logs: dict[int, BinaryIO] = {}
        self._incomplete: set[int] = set()
        if folder is not None:
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise LaunchError(f"log_dir: cannot make {folder}: {error.strerror}") from error

    def pipes(self, local_rank: int) -> tuple[int | None, int | None]:
        """stdout and stderr of a new process: a pipe to copy, or None for the launcher's own."""
        streams = 3 if self._tee == "0" else streams_of(self._tee, local_rank)
        return (PIPE if streams & 1 else None, PIPE if streams & 2 else None)

    def keep_log(self, rank: int) -> None:
        """Opens the file of ``rank``, if files are requested, after what an earlier launch wrote (a requeued job)."""
        if self._folder is not None and rank not in self._logs:
            # Without a buffer, whose rest would be written, or refused, when the file is closed.
            self._logs[rank] = (self._folder / f"rank_{rank}.log").open("ab", buffering=0)

    def follow(self, rank: int, source: BinaryIO, sink: BinaryIO) -> None:
        """Copies ``source`` until its end, in its own thread."""
        thread = threading.Thread(target=self._copy, args=(rank, source, sink), name=f"output-{rank}", daemon=True)
        thread.start()
        self._threads.append(thread)

    def note(self, rank: int, text: str) -> None:
        """Appends text to the file of ``rank`` that the process could not print itself."""
        self._log(rank, text.encode(errors="replace"))

    def close(self, timeout: float = 2.0) -> None:
        """Waits for pending output, at most ``timeout``: a process that outlived its rank may hold a stream open."""
        for thread in self._threads:
            thread.join(timeout)
        with self._lock:
            for log in self._logs.values():
                log.close()
            self._logs.clear()

    def _copy(self, rank: int, source: BinaryIO, sink: BinaryIO) -> None:
        mark = self._mark(rank, sink)
        rest = b""
        with source:
            while chunk := os.read(source.fileno(), _CHUNK):
                whole, rest = _whole_lines(rest + chunk)
                self._log(rank, whole)
                self._write(sink, _marked(whole, mark) if mark else chunk)
        if rest:
            self._log(rank, rest + b"\n")
        if rest and mark:
            self._write(sink, mark + rest + b"\n")

    def _mark(self, rank: int, sink: BinaryIO) -> bytes:
        if not self._prefix:
            return b""
        text = f"[{self._role} {rank}]" if self._role else f"[rank {rank}]"
        if not coloured(sink, os.environ):
            return f"{text} ".encode()
        return f"\033[{_COLOURS[rank % len(_COLOURS)]}m{text}\033[0m ".encode()

    def _log(self, rank: int, data: bytes) -> None:
        with self._lock:
            if not data or rank not in self._logs:
                return
            try:
                self._logs[rank].write(data)
                return
            except OSError as error:  # a full disk must not stop the processes either
                told, reason = rank in self._incomplete, error.strerror
                self._incomplete.add(rank)
        if not told:
            self._write(sys.stderr.buffer, f"accel launch: the log of rank {rank} is incomplete: {reason}\n".encode())

    def _write(self, sink: BinaryIO, data: bytes) -> None:
        # A closed reader of our output must not stop the processes, which would block on a full pipe.
        with self._lock, contextlib.suppress(OSError):
            sink.write(data)
            sink.flush()


def say(text: str) -> None:
    """Prints a message of the launcher; a job also goes on if nobody can read it (a closed terminal, a full disk)."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def streams_of(tee: str, local_rank: int) -> int:
    """Streams of a process that ``tee`` selects: 1 stdout, 2 stderr, 3 both, 0 none."""
    if ":" not in tee:
        return int(tee)
    chosen = dict(part.split(":") for part in tee.split(","))
    return int(chosen.get(str(local_rank), "0"))


def coloured(sink: BinaryIO, env: Mapping[str, str]) -> bool:
    """Whether ``sink`` shows colours: a terminal without NO_COLOR (no-color.org), or FORCE_COLOR."""
    if env.get("NO_COLOR") or env.get("TERM") == "dumb":
        return False
    return bool(env.get("FORCE_COLOR")) or sink.isatty()


def _whole_lines(data: bytes) -> tuple[bytes, bytes]:
    """Splits ``data`` after its last full line; a carriage return ends a line too, for progress bars."""
    end = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
    return data[:end], data[end:]


def _marked(lines: bytes, mark: bytes) -> bytes:
    return b"".join(mark + line + b"\n" for line in lines.splitlines())

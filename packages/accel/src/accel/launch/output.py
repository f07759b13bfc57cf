"""Where the output of the processes goes: untouched, or through the launcher with the rank before each line."""

import contextlib
import os
import threading
from pathlib import Path
from typing import BinaryIO, final

from accel_state.errors import LaunchError

_CHUNK = 65536


@final
class Output:
    """Copies what the processes of one attempt print to the launcher's own streams and to one file per rank.

    Used only where a prefix or files are asked for; otherwise the processes write to the launcher's streams directly,
    and a progress bar still sees a terminal.

    Raises:
        LaunchError: where ``folder`` cannot be made.
    """

    def __init__(self, *, prefix: bool, folder: Path | None) -> None:
        self._prefix = prefix
        self._folder = folder
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._logs: dict[int, BinaryIO] = {}
        if folder is not None:
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise LaunchError(f"log_dir: cannot make {folder}: {error.strerror}") from error

    def follow(self, rank: int, source: BinaryIO, sink: BinaryIO) -> None:
        """Copies ``source`` until its end, in a thread of its own."""
        if self._folder is not None and rank not in self._logs:
            self._logs[rank] = (self._folder / f"rank_{rank}.log").open("wb")
        thread = threading.Thread(target=self._copy, args=(rank, source, sink), name=f"output-{rank}", daemon=True)
        thread.start()
        self._threads.append(thread)

    def note(self, rank: int, text: str) -> None:
        """Adds to the file of ``rank`` what the process could not print itself."""
        self._log(rank, text.encode(errors="replace"))

    def close(self, timeout: float = 2.0) -> None:
        """Waits for what is on its way; a process that outlived its rank may hold a stream open for longer."""
        for thread in self._threads:
            thread.join(timeout)
        with self._lock:
            for log in self._logs.values():
                log.close()
            self._logs.clear()

    def _copy(self, rank: int, source: BinaryIO, sink: BinaryIO) -> None:
        mark = f"[rank {rank}] ".encode() if self._prefix else b""
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

    def _log(self, rank: int, data: bytes) -> None:
        with self._lock:
            if data and rank in self._logs:
                self._logs[rank].write(data)
                self._logs[rank].flush()

    def _write(self, sink: BinaryIO, data: bytes) -> None:
        # A reader that has gone away must not stop the processes, which would block on a full pipe.
        with self._lock, contextlib.suppress(OSError):
            sink.write(data)
            sink.flush()


def _whole_lines(data: bytes) -> tuple[bytes, bytes]:
    """``data`` up to the end of its last line, and what follows; a progress bar ends lines with a carriage return."""
    end = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
    return data[:end], data[end:]


def _marked(lines: bytes, mark: bytes) -> bytes:
    return b"".join(mark + line + b"\n" for line in lines.splitlines())

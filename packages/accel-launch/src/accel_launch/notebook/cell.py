"""A launcher run from a cell: its output appears in the cell, and an interrupt of the cell ends it."""

import codecs
import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import IO, TextIO, final

_CHUNK = 65536
_LAST_WORDS = "accel launch: rank "
_PATIENCE = 30.0


@final
class Copier:
    """Copies the output of a process to a text stream as it arrives, including progress bars.

    Lines from the first that begins with ``last_words`` are kept in ``kept`` instead, for the error message.
    """

    def __init__(self, source: IO[bytes], sink: TextIO, last_words: str | None = None) -> None:
        self.kept = ""
        self._source = source
        self._sink = sink
        self._last_words = last_words
        self._keeping = False
        self._at_start = True
        self._thread = threading.Thread(target=self._copy, name="accel-cell", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Waits for the rest of the output."""
        self._thread.join(_PATIENCE)

    def _copy(self) -> None:
        decode = codecs.getincrementaldecoder("utf-8")(errors="replace").decode
        with self._source:
            while chunk := os.read(self._source.fileno(), _CHUNK):
                for line in decode(chunk).splitlines(keepends=True):
                    self._take(line)
                with contextlib.suppress(ValueError, OSError):
                    self._sink.flush()

    def _take(self, line: str) -> None:
        if self._last_words is not None and self._at_start and line.startswith(self._last_words):
            self._keeping = True
        self._at_start = line.endswith("\n")
        if self._keeping:
            self.kept += line
        else:
            with contextlib.suppress(ValueError, OSError):
                self._sink.write(line)


def run_in_cell(command: Sequence[str], env: Mapping[str, str]) -> tuple[int, str]:
    """Runs a launcher until it exits; returns its exit status, and its failure report, which is not printed.

    The launcher's standard input is a pipe of this process, whose end ends the launcher with this process. An interrupt
    (Ctrl-C, or a notebook's button) ends the launcher with all of its processes, and is then raised here.
    """
    process = subprocess.Popen(
        command,
        env=dict(env),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    copiers = [Copier(process.stdout, sys.stdout), Copier(process.stderr, sys.stderr, _LAST_WORDS)]
    try:
        status = process.wait()
    except BaseException:
        _end(process)
        raise
    finally:
        for copier in copiers:
            copier.close()
        with contextlib.suppress(OSError):
            process.stdin.close()
    return status, copiers[1].kept


def _end(process: "subprocess.Popen[bytes]") -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        process.send_signal(number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_PATIENCE)
            return

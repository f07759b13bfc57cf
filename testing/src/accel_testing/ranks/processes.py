"""Rank processes and fork servers, as seen from the test process."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any, final

from accel_testing.errors import RankError
from accel_testing.ranks.stacks import DUMP_STACKS, describe_place
from accel_testing.ranks.wire import Answer, Closed

_START_TIMEOUT = 120.0
_MODULE = "accel_testing.ranks.fork_server"


@final
class ForkServer:
    """The process that a rank, or programs, are forked from; it starts in the background."""

    def __init__(self, kind: str, folder: Path, environment: Mapping[str, str], *, preload: Sequence[str] = ()) -> None:
        """``kind`` names a module of functions ``prepare`` and ``become`` (``fork_server.Kind``).

        ``preload`` names modules that the server imports.
        """
        self._folder = folder
        folder.mkdir()
        mine, theirs = socket.socketpair()
        self._socket = mine
        self._unread = b""
        self._ready = self._gone = False
        self._ended: dict[int, int] = {}
        self._unclaimed: list[str] = []
        self._forked = 0
        with theirs, (folder / "server.log").open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", _MODULE, kind, str(theirs.fileno()), str(folder), *preload],
                pass_fds=[theirs.fileno()],
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._closer = weakref.finalize(self, _end, self._process, mine, folder, os.getpid())

    @property
    def alive(self) -> bool:
        """Whether ranks can still be forked from it."""
        return not self._gone and self._process.poll() is None

    def fork(self, files: Sequence[int]) -> int:
        """Forks a process that has the ``files`` of its request; returns its id."""
        self._wait_ready()
        socket.send_fds(self._socket, [b"fork\n"], files)
        return int(self._read("forked ", _START_TIMEOUT))

    def fork_rank(self) -> "Rank":
        """Forks a new rank process."""
        mine, theirs = Pipe(duplex=True)
        number = self._forked
        self._forked += 1
        output, stacks = self._folder / f"output-{number}.txt", self._folder / f"stacks-{number}.txt"
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        files = [theirs.fileno(), os.open(output, flags, 0o600), os.open(stacks, flags, 0o600)]
        try:
            pid = self.fork(files)
        finally:
            theirs.close()
            for file in files[1:]:
                os.close(file)
        return Rank(pid, mine, output=output, stacks=stacks, wait=partial(self.exit_status, pid))

    def exit_status(self, pid: int, timeout: float) -> int | None:
        """Exit status of a rank (negative: a signal), after up to ``timeout`` seconds; None while it runs."""
        deadline = time.monotonic() + timeout
        while pid not in self._ended:
            if not self._take_lines(max(0.0, deadline - time.monotonic())):
                return None
        return self._ended[pid]

    def close(self) -> None:
        """Ends the server and its children."""
        self._closer()

    def _wait_ready(self) -> None:
        if not self._ready:
            self._read("ready", _START_TIMEOUT)
            self._ready = True

    def _read(self, start: str, timeout: float) -> str:
        deadline = time.monotonic() + timeout
        while True:
            for line in self._unclaimed:
                if line.startswith(start):
                    self._unclaimed.remove(line)
                    return line.removeprefix(start)
            if not self._take_lines(max(0.0, deadline - time.monotonic())):
                log = (self._folder / "server.log").read_text(errors="replace") if self._folder.exists() else ""
                what = "has ended" if self._gone else f"gave no answer in {timeout:.0f} s"
                raise RankError(f"the fork server {what}:\n{log[-4000:]}")

    def _take_lines(self, timeout: float) -> bool:
        """Reads lines of the server for up to ``timeout`` seconds; False if there are none or the server is gone."""
        self._socket.settimeout(timeout or 1e-6)
        try:
            data = self._socket.recv(4096)
        except (TimeoutError, BlockingIOError, OSError):
            return False
        finally:
            self._socket.settimeout(None)
        if not data:
            self._gone = True
            return False
        *lines, self._unread = (self._unread + data).split(b"\n")
        for line in lines:
            word, _, rest = line.decode().partition(" ")
            if word == "ended":
                pid, status = rest.split()
                self._ended[int(pid)] = int(status)
            else:
                self._unclaimed.append(line.decode())
        return True


def _end(process: "subprocess.Popen[bytes]", control: socket.socket, folder: Path, owner: int) -> None:
    """Closes the connection, which ends the server; not in a process that was forked from the owner."""
    control.close()
    if os.getpid() != owner:
        return
    try:
        process.wait(5.0)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    shutil.rmtree(folder, ignore_errors=True)


def state_of(pid: int) -> str:
    """State letter of a process on Linux (``S`` sleeping, ``T`` stopped, ``Z`` ended); empty if there is none."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return ""


def lives(pid: int) -> bool:
    """Whether the process exists and has not ended (Linux)."""
    return state_of(pid) not in ("", "Z")


@final
class Rank:
    """One rank process, as seen from the test process."""

    def __init__(
        self, pid: int, connection: Connection, *, output: Path, stacks: Path, wait: Callable[[float], int | None]
    ) -> None:
        """``wait`` waits up to a number of seconds for the process and returns its exit status, None while it runs."""
        self.pid = pid
        self.connection = connection
        self._wait = wait
        self._output = output
        self._stacks = stacks

    def send(self, message: Any) -> None:
        """Sends a message; a rank that is gone is detected when its answer is read."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.connection.send(message)

    def receive(self) -> Answer | None:
        """Reads an available answer; None if the rank is gone."""
        message = self._receive()
        assert message is None or isinstance(message, Answer)
        return message

    def receive_closed(self, timeout: float) -> Closed | None:
        """Waits until the rank has left its group; None if it does not."""
        if not self.connection.poll(timeout):
            return None
        message = self._receive()
        return message if isinstance(message, Closed) else None

    def _receive(self) -> Any:
        try:
            return self.connection.recv()
        except (EOFError, ConnectionResetError):
            return None

    def is_gone(self) -> bool:
        """Whether the rank has ended between two jobs: its connection, which is silent then, is closed first."""
        return self.connection.poll() or self.exit_status(0.0) is not None

    def exit_status(self, timeout: float) -> int | None:
        """Exit status of the process, None while it runs."""
        return self._wait(timeout)

    def output(self, limit: int) -> str:
        """Last ``limit`` bytes of the rank's output."""
        with contextlib.suppress(OSError), self._output.open("rb") as file:
            file.seek(max(0, self._output.stat().st_size - limit))
            return file.read().decode(errors="replace")
        return ""

    def condition(self) -> str:
        """A remark in parentheses if a signal has stopped the process (Linux), otherwise empty."""
        stopped = state_of(self.pid) in ("T", "t")
        return " (the process is stopped, by SIGSTOP or a debugger)" if stopped else ""

    def request_stacks(self) -> None:
        """Makes the process write the stacks of all its threads."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, DUMP_STACKS)

    def stacks(self, timeout: float = 2.0) -> str:
        """The written stacks, once complete; a stopped process is continued for that."""
        if self.condition():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGCONT)
        deadline = time.monotonic() + timeout
        before = ""
        while True:
            text = self._stacks.read_text(errors="replace")
            if (text == before and text.count("\n") > 1) or time.monotonic() > deadline:
                return text
            before = text
            time.sleep(0.05)

    def place(self) -> str:
        """Describes the rank's current position in the code."""
        self.request_stacks()
        return describe_place(self.stacks())

    def kill(self) -> None:
        """Kills the process and its descendants."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self._wait(5.0)
        self.connection.close()

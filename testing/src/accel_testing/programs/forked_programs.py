"""Programs of Python that are forked from a server which has imported torch, as seen from the test process."""

import json
import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import final

from accel_testing.programs.forked_program import can_serve, parse
from accel_testing.ranks.environment import rank_environment
from accel_testing.ranks.fork_server import ROOM
from accel_testing.ranks.processes import ForkServer

# Room for the command and the variables of a program in what ``/proc`` shows of the server's, which it overwrites. The
# system allows 128 KiB for one of them.
_ROOM = {"ACCEL_TESTING_ROOM_1": "-" * 60_000, "ACCEL_TESTING_ROOM_2": "-" * 60_000}
_FOREVER = 1e9
_KIND = "accel_testing.programs.forked_program"


@final
class ForkedProgram:
    """One program, with the methods of ``subprocess.Popen`` that a run needs."""

    def __init__(self, pid: int, server: ForkServer) -> None:
        self.pid = pid
        self._server = server

    def poll(self) -> int | None:
        """Exit status (negative: a signal), None while the program runs."""
        return self._server.exit_status(self.pid, 0.0)

    def wait(self, timeout: float | None = None) -> int:
        """Exit status, after up to ``timeout`` seconds.

        Raises:
            subprocess.TimeoutExpired: the program still runs.
        """
        status = self._server.exit_status(self.pid, _FOREVER if timeout is None else timeout)
        if status is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        return status

    def send_signal(self, number: int) -> None:
        """Sends a signal."""
        os.kill(self.pid, number)


@final
class ForkedPrograms:
    """The fork server of the programs of one test process; started by the first program."""

    def __init__(self, preload: Sequence[str] = ()) -> None:
        """``preload`` names modules that the server imports, beside torch; none of the packages that are tested."""
        self._preload = ("torch", "torch.distributed", *preload)
        self._folder: Path | None = None
        self._environment: dict[str, str] = {}
        self._server: ForkServer | None = None
        #: Held by a run. Another one that begins meanwhile, in another thread, starts its programs by exec.
        self.lock = threading.Lock()

    def start(
        self, command: Sequence[str], environment: Mapping[str, str], *, folder: str, output: int
    ) -> ForkedProgram | None:
        """Starts a program that writes to the file ``output``; None if it cannot be forked here."""
        if parse(command) is None:
            return None
        server = self._running()
        if not can_serve(self._environment, environment):
            return None
        with tempfile.TemporaryFile() as request:
            request.write(json.dumps([list(command), dict(environment), folder]).encode())
            request.flush()
            request.seek(0)
            return ForkedProgram(server.fork([request.fileno(), output]), server)

    def close(self) -> None:
        """Ends the server and its programs."""
        if self._server is not None:
            self._server.close()
            self._server = None
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def _running(self) -> ForkServer:
        if self._server is None or not self._server.alive:
            self.close()
            self._folder = Path(tempfile.mkdtemp(prefix="accel-programs-"))
            self._environment = rank_environment(os.environ)
            preload = (*self._preload, ROOM * 4000)
            self._server = ForkServer(_KIND, self._folder / "server", {**self._environment, **_ROOM}, preload=preload)
        return self._server

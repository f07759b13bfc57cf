"""Ranks started by a launcher, in the same way as a user's script."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Listener
from pathlib import Path
from typing import final

from accel_testing.errors import RankError
from accel_testing.ranks import hash_seeds
from accel_testing.ranks.environment import rank_environment
from accel_testing.ranks.launchers import LAUNCHERS, free_port
from accel_testing.ranks.processes import Rank, lives

_START_TIMEOUT = 120.0
_UNKNOWN_STATUS = 1


@final
class LaunchedRanks:
    """Teams of ranks, one for each size, each started by ``accel launch`` or ``torchrun``."""

    def __init__(self, launcher: str, preload: Sequence[str] = ()) -> None:
        """``launcher`` is one of ``LAUNCHERS``; ``preload`` names modules to import before the first job."""
        self._launcher = launcher
        self._preload = tuple(preload)
        self._environment = rank_environment(os.environ)
        self._teams: dict[int, _Team] = {}

    def prepare(self, size: int) -> Mapping[str, str]:
        """Starts nothing ahead, because a launcher needs the number of ranks."""
        return self._environment

    def team(self, size: int) -> list[Rank]:
        """Ranks of the launcher of this size; the launcher is restarted if one of its ranks is gone."""
        team = self._teams.get(size)
        if team is not None and any(rank.is_gone() for rank in team.ranks):
            self._teams.pop(size).close()
        if size not in self._teams:
            variables = {**self._environment, **hash_seeds.of_programs(self._environment)}
            self._teams[size] = _Team(self._launcher, size, variables, self._preload)
        return self._teams[size].ranks

    def discard(self) -> None:
        """Ends all teams with their launchers."""
        while self._teams:
            self._teams.popitem()[1].close()

    def close(self) -> None:
        """Ends all teams with their launchers."""
        self.discard()


@final
class _Team:
    """One launcher and its ranks."""

    def __init__(self, launcher: str, size: int, environment: Mapping[str, str], preload: Sequence[str]) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="accel-ranks-"))
        address = self._folder / "ranks"
        command = [
            *LAUNCHERS[launcher](size, free_port()),
            "--module" if launcher == "accel" else "-m",
            "accel_testing.ranks.launched_rank",
            str(address),
            str(os.getpid()),
            *preload,
        ]
        with (self._folder / "launcher.log").open("w") as log, Listener(str(address), "AF_UNIX", size) as listener:
            self._process = subprocess.Popen(
                [sys.executable, *command],
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
            self._closer = weakref.finalize(self, _end, self._process, self._folder)
            self.ranks = self._accept(listener, size)
        if len(self.ranks) < size:
            printed = (self._folder / "launcher.log").read_text(errors="replace")
            self.close()
            raise RankError(f"{launcher!r} started {len(self.ranks)} of {size} ranks:\n{printed[-4000:]}")

    def _accept(self, listener: Listener, size: int) -> list[Rank]:
        """Accepts the connections of ``size`` ranks before the launcher ends or a timeout, in rank order."""
        ranks: dict[int, Rank] = {}
        listener._listener._socket.settimeout(1.0)  # type: ignore[attr-defined]
        deadline = time.monotonic() + _START_TIMEOUT
        while len(ranks) < size:
            try:
                connection = listener.accept()
            except TimeoutError:
                if self._process.poll() is None and time.monotonic() < deadline:
                    continue
                break
            rank, pid = connection.recv()
            output, stacks = (self._folder / f"{name}-{pid}.txt" for name in ("output", "stacks"))
            ranks[rank] = Rank(pid, connection, output=output, stacks=stacks, wait=partial(_wait_for_end, pid))
        return [ranks[rank] for rank in sorted(ranks)]

    def close(self) -> None:
        """Ends the launcher and its ranks."""
        for rank in self.ranks:
            rank.kill()
        self._closer()


def _wait_for_end(pid: int, timeout: float) -> int | None:
    """Waits for a process that is not a child of this one; returns 1 as its status, which only its parent can read."""
    deadline = time.monotonic() + timeout
    while lives(pid):
        if time.monotonic() >= deadline:
            return None
        time.sleep(0.02)
    return _UNKNOWN_STATUS


def _end(process: "subprocess.Popen[bytes]", folder: Path) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    shutil.rmtree(folder, ignore_errors=True)

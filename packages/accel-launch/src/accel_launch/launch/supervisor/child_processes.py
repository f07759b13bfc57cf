"""Processes of one attempt on this machine: started together, watched, and ended together."""

import contextlib
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import final

from accel_launch.launch.child_main import COMMAND, ERROR_FILE_VARIABLE, LAUNCHER_VARIABLE, WORKER_MODULE
from accel_launch.launch.launch_plan import ProcessPlan
from accel_launch.launch.supervisor.failure import (
    Exit,
    Failure,
    failed_at,
    has_relayed,
    in_order,
    read_end,
    read_failure,
)
from accel_launch.launch.supervisor.interrupts import FOR_PROCESSES, Interrupts
from accel_launch.launch.supervisor.orphan_reaper import Guard
from accel_launch.launch.supervisor.output import Output
from accel_launch.preemption.exit_status import FAILED_MARK, PREEMPTED_STATUS
from accel_state.errors import LaunchError

# Seconds between two polls where the system cannot signal when a process ends.
_POLL = 0.05
# Seconds after which a killed process is abandoned: it hangs in the kernel and cannot be ended.
_UNKILLABLE = 5.0
# Seconds to wait for the error of the culprit rank, and for a peer's report about a killed rank.
_CAUSE = 5.0
_WITNESS = 2.0
_MAY_SAVE = (signal.SIGTERM, *FOR_PROCESSES)


@final
class Workers:
    """Processes that start and end together, each the leader of its own session and process group.

    An exited process stays unreaped until ``close``, so that its id, which is also its group's, cannot be reused while
    the group is being ended.
    """

    def __init__(self, *, folder: Path, output: Output | None, interrupts: Interrupts, guard: Guard) -> None:
        self._folder = folder
        self._guard = guard
        self._output = output
        self._interrupts = interrupts
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._exits: dict[int, Exit] = {}
        self._watches: dict[int, int] = {}
        self._stopping = False
        self._commands: set[int] = set()

    def start(self, processes: Sequence[ProcessPlan], attempt: Mapping[str, str]) -> None:
        """Starts all; ``attempt`` is added to each environment. After an error, ``close`` ends the started processes.

        Raises:
            LaunchError: the system refuses another process.
        """
        for process in processes:
            env = {**process.environment(os.environ), **attempt}
            env[ERROR_FILE_VARIABLE] = str(self._error_file(process.rank))
            env[LAUNCHER_VARIABLE] = str(os.getpid())
            out, err = (None, None) if self._output is None else self._output.pipes(process.local_rank)
            try:
                started = subprocess.Popen(process.argv, env=env, stdout=out, stderr=err, start_new_session=True)
            except OSError as error:
                raise LaunchError(f"cannot start rank {process.rank} ({process.argv[0]}): {error.strerror}") from error
            self._processes[process.rank] = started
            self._guard.watch([started.pid for started in self._processes.values()])
            if process.argv[3:5] == (WORKER_MODULE, COMMAND):  # for example a shell, which does not forward signals
                self._commands.add(process.rank)
            with contextlib.suppress(AttributeError, OSError):  # Linux before 5.3, and containers that forbid it
                self._watches[process.rank] = os.pidfd_open(started.pid)
            if self._output is not None:
                self._output.keep_log(process.rank)
                for source, sink in ((started.stdout, sys.stdout.buffer), (started.stderr, sys.stderr.buffer)):
                    if source is not None:
                        self._output.follow(process.rank, source, sink)  # type: ignore[arg-type]

    @property
    def pids(self) -> dict[int, int]:
        """Process ids by rank."""
        return {rank: process.pid for rank, process in self._processes.items()}

    @property
    def running(self) -> list[int]:
        """Ranks that have not ended."""
        return [rank for rank in self._processes if rank not in self._exits]

    @property
    def failed(self) -> bool:
        """Whether a process has failed without being stopped by the launcher."""
        return any(ended.status not in (0, PREEMPTED_STATUS) and not ended.stopped for ended in self._exits.values())

    @property
    def preempted(self) -> bool:
        """Whether a process has saved and exited because of a preemption; the others are about to."""
        return any(ended.status == PREEMPTED_STATUS for ended in self._exits.values())

    def wait(self, timeout: float) -> None:
        """Waits until a process exits, a signal arrives or ``timeout`` seconds have passed; records the exits."""
        unwatched = [rank for rank in self.running if rank not in self._watches]
        with selectors.DefaultSelector() as selector:
            selector.register(self._interrupts, selectors.EVENT_READ)
            for rank in self.running:
                if rank in self._watches:
                    selector.register(self._watches[rank], selectors.EVENT_READ)
            selector.select(min(timeout, _POLL) if unwatched else timeout)
        self._interrupts.drain()
        for number in self._interrupts.take_other():
            self._ask(number)
        for rank in self.running:
            status = _status(self._processes[rank])
            if status is not None:
                pid = self._processes[rank].pid
                self._exits[rank] = Exit(rank, pid, status, time.time(), stopped=self._stopping)

    def stuck(self, patience: float) -> bool:
        """Whether a process recorded its error more than ``patience`` seconds ago and is still running.

        It may hang in its exit handlers or in a thread while the other ranks wait for it in a collective.
        """
        now = time.time()
        times = (failed_at(self._error_file(rank), self._processes[rank].pid) for rank in self.running)
        return any(at is not None and now - at > patience for at in times)

    def stop(self, number: signal.Signals, grace: float) -> None:
        """Ends all: sends ``number``, and kills processes that still run after ``grace`` seconds or a second signal.

        If the known errors only follow from another rank's, waits briefly for that rank to record its own.
        """
        if self.failed and not self._interrupts.received:
            self._wait_for_cause()
        self._stopping = True
        if not self._interrupts.received and not self.preempted:
            # Otherwise the processes take the signal for a preemption. Systems clear /tmp of what is some days old.
            with contextlib.suppress(OSError):
                self._folder.mkdir(parents=True, exist_ok=True)
                (self._folder / FAILED_MARK).touch()
        self._ask(number)
        self.wait_all(grace)
        self._signal_groups(signal.SIGKILL, self.running)
        self._wait_all(_UNKILLABLE, lambda: True)

    def wait_all(self, seconds: float) -> None:
        """Waits until all have exited, at most ``seconds`` or until a signal arrives."""
        asked = len(self._interrupts.received)
        self._wait_all(seconds, lambda: len(self._interrupts.received) == asked)

    def failures(self) -> list[Failure]:
        """Failures, the cause first."""
        failures, ends = (
            [read(ended, self._error_file(rank)) for rank, ended in self._exits.items()]
            for read in (read_failure, read_end)
        )
        return in_order(filter(None, failures), filter(None, ends))

    def close(self) -> None:
        """Ends the processes left in the groups, and reads the rest of the output.

        After a success they receive SIGTERM, because they may have work to finish; after a failure they are killed.
        """
        if self.running:
            self.stop(signal.SIGKILL, 0.0)
        clean = all(ended.status == 0 for ended in self._exits.values())
        self._signal_groups(signal.SIGTERM if clean else signal.SIGKILL, list(self._processes))
        self._guard.watch([])
        for rank in self._exits:
            self._processes[rank].wait()
        for watch in self._watches.values():
            os.close(watch)
        self._watches.clear()
        if self._output is not None:
            for failure in self.failures():
                self._output.note(failure.exit.rank, failure.trace)
            self._output.close()

    def _error_file(self, rank: int) -> Path:
        return self._folder / f"error_{rank}.json"

    def _wait_for_cause(self) -> None:
        """Waits for an error that does not follow from another, and for a peer's report about a silent rank."""
        start = time.monotonic()
        while self.running and not self._interrupts.received:
            failures, waited = self.failures(), time.monotonic() - start
            written = [has_relayed(self._error_file(rank), self._processes[rank].pid) for rank in self.running]
            own = [failure for failure in failures if not failure.relayed]
            silent = bool(own) and not any(failure.summary for failure in own) and False not in written
            witnessed = True in written or len(own) < len(failures)
            known = bool(own) or False in written
            if waited > _CAUSE or (known and (not silent or witnessed or waited > _WITNESS)):
                return
            self.wait(_POLL)

    def _wait_all(self, seconds: float, patient: Callable[[], bool]) -> None:
        deadline = time.monotonic() + seconds
        while self.running and patient() and (left := deadline - time.monotonic()) > 0:
            self.wait(left)

    def _ask(self, number: signal.Signals) -> None:
        """Sends a signal to all: to a Python process alone if it may save, as saving needs its loaders' workers."""
        alone = [rank for rank in self.running if number in _MAY_SAVE and rank not in self._commands]
        for rank in alone:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(self._processes[rank].pid, number)
        self._signal_groups(number, [rank for rank in self.running if rank not in alone])

    def _signal_groups(self, number: signal.Signals, ranks: Sequence[int]) -> None:
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._processes[rank].pid, number)


def _status(process: subprocess.Popen[bytes]) -> int | None:
    """Exit status of ``process``, negative for a signal; None while it runs. Leaves it unreaped if possible."""
    if not hasattr(os, "waitid"):
        return process.poll()
    ended = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if ended is None:
        return None
    return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status

"""Runs scripts in their own processes, as a launcher does, with a time limit, and finds processes left behind."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TypeAlias, final

from accel_testing.programs.forked_programs import ForkedProgram, ForkedPrograms
from accel_testing.ranks import hash_seeds
from accel_testing.ranks.environment import rank_environment, rank_variables
from accel_testing.ranks.launchers import LAUNCHERS, free_port
from accel_testing.ranks.processes import lives
from accel_testing.ranks.stacks import describe_exit

# Variable that every descendant inherits, whatever session or group it moves to; used to find orphans.
_MARK = "ACCEL_TESTING_RUN"
# Seconds that the system may take to end a process after SIGKILL.
_KILLED = 10.0


_Process: TypeAlias = "subprocess.Popen[bytes] | ForkedProgram"
_forked: ForkedPrograms | None = None


@contextlib.contextmanager
def forked_programs(preload: Sequence[str] = ()) -> Iterator[None]:
    """Forks the programs of Python that are run in the block from a server that has imported torch, where it can.

    ``preload`` names more modules that the server imports. ``python -c`` and programs whose variables are read at the
    start of Python or torch are started by exec, as all others are.
    """
    global _forked
    before, _forked = _forked, ForkedPrograms(preload)
    try:
        yield
    finally:
        _forked.close()
        _forked = before


@contextlib.contextmanager
def started_programs() -> Iterator[None]:
    """Starts all programs of the block by exec."""
    global _forked
    before, _forked = _forked, None
    try:
        yield
    finally:
        _forked = before


@contextlib.contextmanager
def _forking() -> Iterator[ForkedPrograms | None]:
    """The server of this process, if there is one and no other run uses it."""
    forked = _forked
    if forked is None or not forked.lock.acquire(blocking=False):
        yield None
        return
    try:
        yield forked
    finally:
        forked.lock.release()


@final
@dataclass(frozen=True, slots=True)
class Finished:
    """Result of a run: exit status and output of each process, and processes that were still running afterwards.

    ``statuses`` are negative for signals, as in ``subprocess``; ``timed_out``: the run was killed.
    """

    command: tuple[str, ...]
    statuses: tuple[int, ...]
    outputs: tuple[str, ...]
    orphans: tuple[str, ...]
    seconds: float
    timed_out: bool

    @property
    def status(self) -> int:
        """Exit status of the run: the first that is not 0, by rank."""
        return next((status for status in self.statuses if status), 0)

    @property
    def output(self) -> str:
        """Output of all processes (stdout and stderr interleaved), by rank."""
        return "".join(self.outputs)

    def check(self) -> "Finished":
        """Returns self if every process exited with 0 in time and left no process behind; otherwise AssertionError."""
        __tracebackhide__ = True
        complaints = [
            f"rank {rank} {describe_exit(status)}" if len(self.statuses) > 1 else f"it {describe_exit(status)}"
            for rank, status in enumerate(self.statuses)
            if status
        ]
        if self.timed_out:
            complaints.insert(0, f"not done after {self.seconds:.0f} s, so it was killed")
        complaints += self._orphan_lines()
        self._fail(complaints)
        return self

    def check_failed(self) -> "Finished":
        """Returns self if the run failed on its own, in time, and left no process behind; otherwise AssertionError."""
        __tracebackhide__ = True
        complaints = [] if self.status else ["it ended with exit status 0, where a failure was expected"]
        if self.timed_out:
            complaints = [f"not done after {self.seconds:.0f} s, so it was killed"]
        self._fail(complaints + self._orphan_lines())
        return self

    def _orphan_lines(self) -> list[str]:
        return [f"process {orphan} stayed behind" for orphan in self.orphans]

    def _fail(self, complaints: list[str]) -> None:
        __tracebackhide__ = True
        if complaints:
            said = "\n".join(
                f"--- output{f' of rank {rank}' if len(self.outputs) > 1 else ''} ---\n{text[-8000:]}"
                for rank, text in enumerate(self.outputs)
            )
            raise AssertionError("\n".join([" ".join(self.command), *complaints, said]))


def run_command(
    command: Sequence[str | os.PathLike[str]],
    *,
    timeout: float = 120.0,
    env: Mapping[str, str] | Sequence[Mapping[str, str]] | None = None,
    cwd: str | os.PathLike[str] | None = None,
    interrupt_after: float | None = None,
    interrupt: int = signal.SIGINT,
) -> Finished:
    """Runs a command until it exits, or for ``timeout`` seconds; then ends all of its remaining processes.

    ``env`` is added to this process's variables without those of a launcher; several mappings start several processes
    concurrently, one for each. After ``interrupt_after`` seconds the signal ``interrupt`` is sent to the first.
    """
    seats = [env or {}] if env is None or isinstance(env, Mapping) else env
    return _run(
        [os.fspath(word) for word in command],
        [dict(seat) for seat in seats],
        timeout=timeout,
        cwd=cwd,
        interruption=None if interrupt_after is None else (interrupt_after, interrupt),
    )


def run_script(
    script: str | os.PathLike[str],
    *arguments: str,
    ranks: int = 1,
    timeout: float = 120.0,
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
) -> Finished:
    """Runs a script in ``ranks`` processes with the variables that torchrun sets, on a free port of this machine."""
    port = free_port()
    seats = [{**rank_variables(rank, ranks, port), **(env or {})} for rank in range(ranks)]
    return _run([sys.executable, os.fspath(script), *arguments], seats, timeout=timeout, cwd=cwd)


def launch(
    script: str | os.PathLike[str],
    *arguments: str,
    options: Sequence[str] = (),
    timeout: float = 120.0,
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
) -> Finished:
    """Runs a script by ``accel launch`` with ``options`` (as in ``["--num_processes", "2", "--cpu"]``)."""
    command = [sys.executable, "-m", "accel", "launch", *options, os.fspath(script), *arguments]
    return run_command(command, timeout=timeout, env=env, cwd=cwd)


def launch_by(
    launcher: str,
    script: str | os.PathLike[str],
    *arguments: str,
    ranks: int = 2,
    timeout: float = 120.0,
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
) -> Finished:
    """Runs a script on ``ranks`` CPU processes of this machine by one of ``LAUNCHERS``, at a free port."""
    command = [sys.executable, *LAUNCHERS[launcher](ranks, free_port()), os.fspath(script), *arguments]
    return run_command(command, timeout=timeout, env=env, cwd=cwd)


def _run(
    command: list[str],
    seats: list[dict[str, str]],
    *,
    timeout: float,
    cwd: str | os.PathLike[str] | None,
    interruption: tuple[float, int] | None = None,
) -> Finished:
    mark = uuid.uuid4().hex
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        files: list[IO[bytes]] = [stack.enter_context(tempfile.TemporaryFile()) for _ in seats]
        processes: list[_Process] = []
        forked = stack.enter_context(_forking())
        stack.callback(_end_all, processes, mark)
        for seat, file in zip(seats, files, strict=True):
            start = rank_environment(os.environ)
            env = {**start, **seat, **hash_seeds.of_programs({**start, **seat}), _MARK: mark}
            program = forked and forked.start(command, env, folder=os.fspath(cwd or os.getcwd()), output=file.fileno())
            processes.append(program or _started(command, env, cwd=cwd, output=file))
        timed_out = _wait(processes, began + timeout, interruption=interruption)
        seconds = time.monotonic() - began
        orphans = () if timed_out else _settled_orphans(mark)
        _end_all(processes, mark)
        return Finished(
            command=tuple(command),
            statuses=tuple(process.wait() for process in processes),
            outputs=tuple(_read(file) for file in files),
            orphans=orphans,
            seconds=seconds,
            timed_out=timed_out,
        )


def _started(
    command: list[str], env: Mapping[str, str], *, cwd: str | os.PathLike[str] | None, output: IO[bytes]
) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        command,
        env=env,
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        preexec_fn=_reset_interrupts if _ignored() else None,
    )


def _ignored() -> list[signal.Signals]:
    """Interrupts that this process ignores, as a shell's background jobs do; its children inherit that."""
    return [number for number in (signal.SIGINT, signal.SIGQUIT) if signal.getsignal(number) is signal.SIG_IGN]


def _reset_interrupts() -> None:
    for number in _ignored():
        signal.signal(number, signal.SIG_DFL)


def _wait(processes: list[_Process], deadline: float, *, interruption: tuple[float, int] | None) -> bool:
    """Waits for all; returns True if the deadline passed first."""
    if interruption is not None:
        after, number = interruption
        with contextlib.suppress(subprocess.TimeoutExpired):
            processes[0].wait(after)
        if processes[0].poll() is None:
            processes[0].send_signal(number)
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            return True
    return False


def _settled_orphans(mark: str, grace: float = 2.0) -> tuple[str, ...]:
    deadline = time.monotonic() + grace
    while (found := find_marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return tuple(f"{pid} ({command})" for pid, command in found.items())


def find_marked(mark: str) -> dict[int, str]:
    """Running processes that were started under a mark, with their commands (Linux; empty on other systems)."""
    wanted = f"{_MARK}={mark}".encode()
    found = {}
    for entry in sorted(Path("/proc").glob("[0-9]*")):
        with contextlib.suppress(OSError):
            if lives(int(entry.name)) and wanted in (entry / "environ").read_bytes().split(b"\0"):
                found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
    return found


def _end_all(processes: list[_Process], mark: str) -> None:
    for process in processes:
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    left = find_marked(mark)
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + _KILLED
    while any(map(lives, left)) and time.monotonic() < deadline:
        time.sleep(0.01)


def _read(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")

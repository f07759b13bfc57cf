"""First failure among the processes of an attempt, and the report about it."""

import json
import signal
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import final

from accel_launch.preemption.exit_status import PREEMPTED_STATUS

_NOTICED_AFTER = 0.5


@final
@dataclass(frozen=True, slots=True)
class Exit:
    """Exit of one process. ``status`` is negative for a signal; ``at`` is the wall-clock time in seconds.

    ``stopped``: the launcher was ending the process at the time, so its status explains nothing.
    """

    rank: int
    pid: int
    status: int
    at: float
    stopped: bool


@final
@dataclass(frozen=True, slots=True)
class Failure:
    """A failed process: its exit, and its recorded error, if there is one.

    ``relayed``: the error only reports that another rank has failed or is gone.
    """

    exit: Exit
    at: float
    summary: str = ""
    trace: str = ""
    relayed: bool = False

    @property
    def status(self) -> int:
        """Exit status as a shell would show it; never 0."""
        if self.exit.stopped or self.exit.status == 0:
            return 1  # stopped after it had failed, or exited with 0 before the others failed
        return 128 - self.exit.status if self.exit.status < 0 else self.exit.status

    @property
    def ending(self) -> str:
        """Describes how the process ended."""
        return "stopped after its error" if self.exit.stopped else _ending(self.exit.status)


def read_failure(ended: Exit, error_file: Path) -> Failure | None:
    """Returns the failure of an exit; None for a success, a preempted run, or a process that was only stopped.

    Its time is that of the recorded error, if there is one: a process may take long to exit after its error, and would
    then seem to have failed after the ranks that failed because of it.
    """
    if ended.status == PREEMPTED_STATUS or (ended.status == 0 and not ended.stopped):
        return None
    record = _read(error_file)
    if record is None or (ended.stopped and record.exit == 0):
        return None if ended.stopped else Failure(ended, ended.at)
    return Failure(ended, record.at, record.summary, record.trace, record.relayed)


def read_end(ended: Exit, error_file: Path) -> Failure | None:
    """Returns the exit of a successful process as a possible cause of other failures; None if it did not succeed."""
    if ended.status != 0 or ended.stopped:
        return None
    record = _read(error_file)
    return Failure(ended, ended.at) if record is None else Failure(ended, record.at, record.summary)


def failed_at(error_file: Path, pid: int) -> float | None:
    """Time at which process ``pid`` recorded the error that will end it; None if it recorded none.

    A file without its pid was written by a child process and is ignored. ``sys.exit`` is not an error, however long
    threads run on after it.
    """
    record = _error_of(error_file, pid)
    return None if record is None else record.at


def has_relayed(error_file: Path, pid: int) -> bool | None:
    """Whether the error of process ``pid`` only follows from another rank's; None if it recorded none."""
    record = _error_of(error_file, pid)
    return None if record is None else record.relayed


@final
@dataclass(frozen=True, slots=True)
class _Record:
    at: float
    pid: int
    summary: str
    trace: str
    relayed: bool = False
    exit: int | None = None


def _error_of(path: Path, pid: int) -> _Record | None:
    record = _read(path)
    return record if record is not None and record.pid == pid and record.exit is None else None


def _read(path: Path) -> _Record | None:
    try:
        at = path.stat().st_mtime
        message = json.loads(path.read_text(encoding="utf-8"))["message"]
        if isinstance(message, str):
            return _Record(at, 0, message, "")
        extra = message.get("extraInfo", {})
        # Torch's own writer records full seconds only; the file's modification time is finer.
        at, pid = float(extra.get("seconds", at)), int(extra.get("pid", 0))
        status = extra.get("exit")
        return _Record(
            at,
            pid,
            str(message.get("message", "")),
            str(extra.get("py_callstack", "")),
            bool(extra.get("relayed", False)),
            None if status is None else int(status),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def in_order(failures: Iterable[Failure], ends: Iterable[Failure] = ()) -> list[Failure]:
    """Sorts failures, the cause first: the earliest failure that does not follow from another rank's.

    If all follow from another, the first of ``ends`` is the cause: a rank that exited successfully while others
    needed it.
    """
    found = sorted(failures, key=lambda failure: (failure.relayed, _began(failure), failure.exit.rank))
    if found and found[0].relayed:
        found[:0] = sorted((end for end in ends if end.at <= found[0].at), key=lambda end: end.at)[:1]
    return found


def _began(failure: Failure) -> float:
    # The exit of a killed process is noticed a little late, and its peers may have failed because of it meanwhile. No
    # process is killed because a peer failed, whereas an abort may well be a consequence.
    return failure.at - (_NOTICED_AFTER if failure.exit.status == -signal.SIGKILL else 0.0)


def report(failures: list[Failure], num_processes: int, *, quiet: bool = False) -> str:
    """Report of a failed attempt: the first failure, then the others, then the first one's traceback.

    The traceback is last, where a reader looks; if the culprit recorded no error, it is that of a rank that failed
    because of it. The first line includes the message if there is no traceback, or if the error only follows from
    another rank's. ``quiet`` leaves only the traceback, or the first line if there is none.
    """
    first, *others = failures
    if quiet and first.trace:
        return first.trace.rstrip()
    cause = "ended first" if first.exit.status == 0 and not first.exit.stopped else "failed first"
    cause = "failed because of another rank" if first.relayed else cause
    lines = [
        f"accel launch: rank {first.exit.rank} of {num_processes} {cause} "
        f"(process {first.exit.pid}, {first.ending}){_colon(first.summary if first.relayed or not first.trace else '')}"
    ]
    if quiet:
        return lines[0]
    for other in others:
        verb = "failed because of another rank" if other.relayed else "then failed too"
        lines.append(f"accel launch: rank {other.exit.rank} {verb} ({other.ending}){_colon(other.summary)}")
    silent = not first.trace and not first.summary
    trace = next((failure.trace for failure in failures if failure.trace), "") if silent else first.trace
    if trace:
        lines += ["", trace.rstrip()]
    return "\n".join(lines)


def _colon(summary: str) -> str:
    return f": {summary}" if summary else ""


def _ending(status: int) -> str:
    if status >= 0:
        return f"exit status {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    hint = ", as the kernel does when memory runs out" if name == "SIGKILL" else ""
    return f"killed by {name}{hint}"

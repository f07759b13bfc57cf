"""Which process failed first, and how that is told."""

import json
import signal
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import final

_NOTICED_AFTER = 0.5


@final
@dataclass(frozen=True, slots=True)
class Exit:
    """The end of one process. ``status`` is negative for a signal; ``at`` is the wall clock in seconds.

    ``stopped`` says that the launcher was ending the process at the time, so that its status explains nothing.
    """

    rank: int
    pid: int
    status: int
    at: float
    stopped: bool


@final
@dataclass(frozen=True, slots=True)
class Failure:
    """A process that ended badly: how, and what it wrote about it, if it could."""

    exit: Exit
    at: float
    summary: str = ""
    trace: str = ""

    @property
    def status(self) -> int:
        """The exit status that a shell would show; never 0."""
        if self.exit.stopped or self.exit.status == 0:
            return 1  # it failed before it was stopped, and did not come to say with which status
        return 128 - self.exit.status if self.exit.status < 0 else self.exit.status

    @property
    def ending(self) -> str:
        """How the process ended, in words."""
        return "stopped after its error" if self.exit.stopped else _ending(self.exit.status)


def read_failure(ended: Exit, error_file: Path) -> Failure | None:
    """The failure that ``ended`` is, or None for a success or for a process that only ended because it was stopped.

    The time is that of the error, where one was written: a process may take long to end after it, and would then
    seem to have failed after those that failed because of it.
    """
    try:
        at = error_file.stat().st_mtime
        message = json.loads(error_file.read_text(encoding="utf-8"))["message"]
    except (OSError, ValueError, KeyError, TypeError):
        return None if ended.status == 0 or ended.stopped else Failure(ended, ended.at)
    if isinstance(message, str):
        return Failure(ended, at, message)
    extra = message.get("extraInfo", {})
    # Torch's own writer knows whole seconds only; the file's date is finer.
    at = float(extra.get("seconds", at))
    return Failure(ended, at, str(message.get("message", "")), str(extra.get("py_callstack", "")))


def in_order(failures: Iterable[Failure]) -> list[Failure]:
    """The failures, the cause of the others first."""
    return sorted(failures, key=lambda failure: (_began(failure), failure.exit.rank))


def _began(failure: Failure) -> float:
    # A killed process is noticed a little later than it ended, and its peers may have failed because of it meanwhile.
    # No process is killed because a peer failed, unlike an abort, which may well be a consequence.
    return failure.at - (_NOTICED_AFTER if failure.exit.status == -signal.SIGKILL else 0.0)


def report(failures: list[Failure], num_processes: int) -> str:
    """What is printed about an attempt that failed: the first failure last, where a reader looks, with its trace."""
    first, *others = failures
    lines = [
        f"accel launch: rank {other.exit.rank} then failed too ({other.ending}){_colon(other.summary)}"
        for other in others
    ]
    lines.append(
        f"accel launch: rank {first.exit.rank} of {num_processes} failed first "
        f"(process {first.exit.pid}, {first.ending}){_colon('' if first.trace else first.summary)}"
    )
    if first.trace:
        lines += ["", first.trace.rstrip()]
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

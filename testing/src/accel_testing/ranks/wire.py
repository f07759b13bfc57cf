"""Messages between the test process and its ranks, pickled by the connection between them."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Outcome = Literal["passed", "failed", "skipped", "xfailed"]


@dataclass(frozen=True, slots=True)
class ModuleSource:
    """A module by name and file, because names that only pytest knows cannot be imported in other processes."""

    name: str
    file: str


@dataclass(frozen=True, slots=True)
class Call:
    """A function with its arguments, pickled by value."""

    payload: bytes


@dataclass(frozen=True, slots=True)
class TestCall:
    """A test function by its name in its module; ``payload`` holds its pickled keyword arguments.

    ``made_in_rank`` names the arguments that every rank makes itself (``rank``, ``world_size``, ``monkeypatch``).
    """

    __test__ = False

    qualname: str
    payload: bytes
    made_in_rank: tuple[str, ...]
    style: str
    show_locals: bool
    warning_filters: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Job:
    """One unit of work for one rank.

    ``backend`` is the backend of the default process group to open first, or None for no group; its ranks meet at
    ``port`` of this machine; ``timeout`` is in seconds; ``variables`` are environment variables during the job (None:
    removed), ``folder`` its working directory; ``checks`` are the leak checks afterwards.
    """

    work: Call | TestCall
    source: ModuleSource | None
    rank: int
    world_size: int
    port: int
    backend: str | None
    timeout: float
    variables: Mapping[str, str | None]
    folder: str
    search_path: tuple[str, ...]
    checks: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Answer:
    """Result of the work on one rank.

    ``value`` is the pickled result or exception (empty if it cannot be pickled), ``at`` the machine's monotonic time of
    its
    end: the rank that fails first is the culprit, and the others often fail only because it is gone.
    """

    outcome: Outcome
    value: bytes = b""
    reason: str = ""
    report: str = ""
    place: tuple[str, int] = ("", 0)
    at: float = field(default_factory=time.monotonic)


@dataclass(frozen=True, slots=True)
class Close:
    """Request to leave the process group, sent once every rank has answered."""


@dataclass(frozen=True, slots=True)
class Closed:
    """A rank is ready for the next job; holds the leaks of the last one."""

    leaks: tuple[str, ...]


def source_of(fn: Callable[..., Any]) -> ModuleSource | None:
    """Module in which a rank finds ``fn``; None if the function is pickled by value."""
    import sys

    name = getattr(fn, "__module__", None)
    module = sys.modules.get(name) if name else None
    file = getattr(module, "__file__", None)
    if name is None or file is None or name == "__main__":
        return None
    return ModuleSource(name, file)

"""Exceptions of accel; ``except AccelError`` catches every error that accel raises on purpose.

Each class also derives from the built-in exception for such a mistake (``ValueError`` for a wrong value,
``RuntimeError`` for a call at the wrong time).
"""

from collections.abc import Iterable
from typing import TypeVar

UNSENDABLE = (
    "{kind} belongs to the process that made it, with its rank, device and group, and cannot be sent to another one "
    "or stored; make it inside the function that runs there"
)
"""Message of the TypeError for pickling a per-process object; ``kind`` is its description."""


class AccelError(Exception):
    """Base class of every error that accel raises on purpose."""

    relayed = False
    """Whether the error only repeats an error of another rank, which is the cause."""


class ConfigError(AccelError, ValueError):
    """A setting has an invalid value, alone or in combination with other settings."""


class TopologyError(AccelError, ValueError):
    """The launcher's variables contradict each other, or a mesh does not fit the number of processes."""


class SessionError(AccelError, RuntimeError):
    """The process group cannot be opened, or is used before opening or after closing."""


class CollectiveError(AccelError, RuntimeError):
    """A collective failed, here or on another rank."""


class CollectiveMismatchError(CollectiveError):
    """The ranks entered one collective with different operations, structures, shapes or dtypes."""


class DataError(AccelError):
    """A dataset or loader does not support the requested sharding, reading or moving."""


class DataStateError(DataError, ValueError):
    """A loader's saved position does not belong to this dataset or this version."""


class BackendError(AccelError):
    """A backend does not exist, or does not support the requested options."""


class PrepareError(BackendError, ValueError):
    """An object given to ``prepare`` cannot be prepared."""


class CheckpointError(AccelError):
    """A checkpoint cannot be written or read."""


class CheckpointCorruptError(CheckpointError):
    """A file of a committed checkpoint is missing, truncated or altered."""


class CheckpointMismatchError(CheckpointError, ValueError):
    """An intact checkpoint does not match the objects that it is loaded into."""


class LaunchError(AccelError):
    """The launcher cannot start the requested processes."""


E = TypeVar("E", bound=AccelError)
# Fragments of torch's errors on a rank whose peer is gone; such an error does not explain why the peer ended.
_LOST_PEER = (
    "by peer",
    "broken pipe",
    "gloo/transport",
    "remote process exited",
    "ncclremoteerror",
    "failed to recv",
    "tcpstore",
)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Returns "; did you mean 'name'?" for the nearest of the known names; empty if none resembles the word."""
    from difflib import get_close_matches

    near = get_close_matches(word, list(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def relayed(error: E) -> E:
    """Marks ``error`` as the repetition of an error of another rank, and returns it."""
    error.relayed = True
    return error


def is_relayed(error: BaseException | None) -> bool:
    """Whether ``error``, or one of its causes, only follows from another rank's exit."""
    seen: set[int] = set()  # guards against an error that is its own cause
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, AccelError):
            waited = isinstance(error, CollectiveError) and not isinstance(error, CollectiveMismatchError)
            if error.relayed or waited:
                return True
        elif isinstance(error, RuntimeError) and any(words in str(error).lower() for words in _LOST_PEER):
            return True
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return False

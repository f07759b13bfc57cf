"""One tree of errors, so that ``except AccelError`` catches whatever accel raises on purpose.

Each class also derives from the built-in that callers of the same mistake elsewhere already catch
(``ValueError`` for a wrong value, ``RuntimeError`` for a wrong moment).
"""

from typing import TypeVar

UNSENDABLE = (
    "{kind} belongs to the process that made it, with its rank, device and group, and cannot be sent to another one "
    "or stored; make it inside the function that runs there"
)
"""What pickling a thing of one process raises, with its ``kind`` put in."""


class AccelError(Exception):
    """Root of the tree: anything accel raises on purpose."""

    relayed = False
    """Whether the error only repeats one that another rank has raised, which is the cause."""


class ConfigError(AccelError, ValueError):
    """A setting has a value that cannot work, alone or with the others."""


class TopologyError(AccelError, ValueError):
    """The launcher's variables contradict each other, or a mesh does not fit the number of processes."""


class SessionError(AccelError, RuntimeError):
    """The process group cannot be opened, or is used before or after its life."""


class CollectiveError(AccelError, RuntimeError):
    """A collective failed, here or on another rank."""


class CollectiveMismatchError(CollectiveError):
    """The ranks entered one collective with different operations, structures, shapes or dtypes."""


class DataError(AccelError):
    """A dataset or loader cannot be sharded, read or moved as asked."""


class DataStateError(DataError, ValueError):
    """A loader's saved position does not belong to this dataset or this version."""


class BackendError(AccelError):
    """A backend cannot be found, chosen or used as asked."""


class PrepareError(BackendError, ValueError):
    """An object given to ``prepare`` cannot be prepared."""


class CheckpointError(AccelError):
    """A checkpoint cannot be written or read."""


class CheckpointCorruptError(CheckpointError):
    """A file of a committed checkpoint is missing, truncated or altered."""


class CheckpointMismatchError(CheckpointError, ValueError):
    """A checkpoint is intact but belongs to other objects than those it is loaded into."""


class LaunchError(AccelError):
    """The launcher cannot start the processes as asked."""


E = TypeVar("E", bound=AccelError)


def relayed(error: E) -> E:
    """``error``, marked as one that only repeats what another rank has raised."""
    error.relayed = True
    return error

"""A free port for the processes of one attempt, reserved until they use it."""

import errno
import socket
from collections.abc import Iterator
from contextlib import contextmanager

from accel_state.errors import LaunchError

DEFAULT_PORT = 29500
"""Default port of the rendezvous of several machines, as with torchrun and Accelerate."""


@contextmanager
def reserved_port(port: int, address: str = "") -> Iterator[int]:
    """Holds ``port``, or a free one for 0, and yields its number.

    The socket is bound and never listens: the kernel does not assign the port to a process that requests any free port,
    while rank 0, which binds with SO_REUSEADDR as torch's store does, can still listen on it.

    Raises:
        LaunchError: another process listens on the port, or this user may not bind it.
    """
    if port:
        check_free(port, address)
    with _bound(port, address) as held:
        yield held.getsockname()[1]


def check_free(port: int, address: str = "") -> None:
    """Refuses a port on which a process listens.

    Raises:
        LaunchError: names the port and why it cannot be used.
    """
    with _bound(port, address) as probe:
        try:
            probe.listen(1)
        except OSError as error:
            raise _refusal(port, error) from error


def _bound(port: int, address: str) -> socket.socket:
    held = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind((address, port))
    except OSError as error:
        held.close()
        raise _refusal(port, error) from error
    return held


def _refusal(port: int, error: OSError) -> LaunchError:
    reasons = {errno.EADDRINUSE: "another program listens on it", errno.EACCES: "ports below 1024 need privileges"}
    reason = reasons.get(error.errno or 0, error.strerror or str(error))
    return LaunchError(f"main_process_port {port} cannot be used: {reason}; 0 takes a free port")

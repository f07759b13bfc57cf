"""Commands that start ranks, by launcher, and ports for their rendezvous."""

import contextlib
import secrets
import socket
from collections.abc import Callable, Mapping

_FIRST_PORT = 10_000
_FIRST_GIVEN_PORT = 32_768  # on Linux (ip_local_port_range); higher on other systems

#: Launchers by name: arguments of Python that start a number of ranks on this machine, with a rendezvous port.
LAUNCHERS: Mapping[str, Callable[[int, int], list[str]]] = {
    "accel": lambda ranks, port: [
        *("-m", "accel", "launch", "--cpu", "--num_processes", str(ranks), "--main_process_port", str(port))
    ],
    "torchrun": lambda ranks, port: [
        *("-m", "torch.distributed.run", "--nproc_per_node", str(ranks), "--master_port", str(port))
    ],
}


def free_port() -> int:
    """Returns a free port below the range that the system assigns to connections and listeners.

    So it stays free unless another program binds this very number, which is drawn at random.
    """
    while True:
        port = _FIRST_PORT + secrets.randbelow(_FIRST_GIVEN_PORT - _FIRST_PORT)
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port

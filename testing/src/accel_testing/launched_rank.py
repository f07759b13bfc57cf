"""The program of a rank that a launcher has started: connects to the test process and serves it."""

import os
import sys
from contextlib import suppress
from multiprocessing.connection import Client
from pathlib import Path


def main(address: str, modules: list[str]) -> None:
    """Serves the test process that listens at ``address``, after importing ``modules``; never returns."""
    from accel_testing.rank import serve, warm

    with suppress(PermissionError):  # torchrun and accel launch give each rank a session of its own
        os.setsid()
    folder, pid = Path(address).parent, os.getpid()
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    output, stacks = (os.open(folder / f"{name}-{pid}.txt", flags, 0o600) for name in ("output", "stacks"))
    for stream in (1, 2):
        os.dup2(output, stream)
    # One store for each job, at the port that the job names, in the place of the launcher's one for the whole run.
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
    warm(modules)
    connection = Client(address, "AF_UNIX")
    connection.send((int(os.environ["RANK"]), pid))
    serve(os.dup(connection.fileno()), stacks)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])

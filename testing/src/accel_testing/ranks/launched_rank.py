"""Main program of a rank that a launcher has started: connects to the test process and serves it."""

import os
import shutil
import signal
import sys
import threading
import time
from contextlib import suppress
from multiprocessing.connection import Client
from pathlib import Path

from accel_testing.ranks.processes import lives

_PARENT_CHECK = 2.0


def main(address: str, test_process: int, modules: list[str]) -> None:
    """Imports ``modules``, then serves the test process, which listens at ``address``; never returns."""
    from accel_testing.ranks.rank import prepare, serve

    # not permitted if the launcher gave the rank its own session, as torchrun and accel launch do
    with suppress(PermissionError):
        os.setsid()
    folder, pid = Path(address).parent, os.getpid()
    threading.Thread(target=_end_with, args=(test_process, folder), daemon=True).start()
    # Each job has its own store, at the job's port, instead of the launcher's store of the full run.
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
    prepare(modules)
    connection = Client(address, "AF_UNIX")
    # Redirected only now, so that the launcher's log has the error of a rank that could not start.
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    output, stacks = (os.open(folder / f"{name}-{pid}.txt", flags, 0o600) for name in ("output", "stacks"))
    for stream in (1, 2):
        os.dup2(output, stream)
    connection.send((int(os.environ["RANK"]), pid))
    serve(os.dup(connection.fileno()), stacks)


def _end_with(test_process: int, folder: Path) -> None:
    """Kills this rank and its children when the test process ends, also during a job."""
    while lives(test_process):
        time.sleep(_PARENT_CHECK)
    shutil.rmtree(folder, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3:])

"""The program of a rank that a launcher has started: connects to the test process and serves it."""

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
    """Serves the test process, which listens at ``address``, after importing ``modules``; never returns."""
    from accel_testing.ranks.rank import serve, warm

    with suppress(PermissionError):  # torchrun and accel launch give each rank a session of its own
        os.setsid()
    folder, pid = Path(address).parent, os.getpid()
    threading.Thread(target=_end_with, args=(test_process, folder), daemon=True).start()
    # Each job has a store of its own, at the port that the job names, instead of the launcher's for the whole run.
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
    warm(modules)
    connection = Client(address, "AF_UNIX")
    # Only now, so that the launcher's log has the error of a rank that could not start.
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    output, stacks = (os.open(folder / f"{name}-{pid}.txt", flags, 0o600) for name in ("output", "stacks"))
    for stream in (1, 2):
        os.dup2(output, stream)
    connection.send((int(os.environ["RANK"]), pid))
    serve(os.dup(connection.fileno()), stacks)


def _end_with(test_process: int, folder: Path) -> None:
    """Kills this rank and its children once the test process has ended, also in the middle of a job."""
    while lives(test_process):
        time.sleep(_PARENT_CHECK)
    shutil.rmtree(folder, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3:])

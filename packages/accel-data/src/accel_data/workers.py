"""What became of a DataLoader's worker processes, when reading failed."""

from contextlib import suppress
from multiprocessing.connection import wait
from typing import Any

from accel_data.cursor import Cursor
from accel_data.source import Pass
from accel_state.errors import DataError

_PATIENCE = 0.5
"""Seconds: a dying process closes its connections a little before it is dead."""


def read_out_of_order(dataloader: Any) -> int:
    """How many batches may be ahead of one that is delivered later; 0 where batches come in order."""
    if dataloader.num_workers < 2 or getattr(dataloader, "in_order", True):
        return 0
    ahead: int = dataloader.num_workers * (dataloader.prefetch_factor or 2)
    return ahead


def death_of_workers(run: Pass) -> DataError | None:
    """What to raise when workers that read for ``run`` have died; None when all live, or there are none.

    A dead worker shows itself as whatever its parent was just doing: a lost connection, an end of file, a timeout.
    The workers that are left are stopped, for there is nobody to read them on.
    """
    batches: Any = run.readers
    for _ in getattr(batches, "_workers", None) or ():
        # torch's handler of SIGCHLD raises wherever the program is, once for each worker that dies.
        with suppress(RuntimeError):
            return _death(batches, run.step(run.delivered).cursor)
    return _death(batches, run.step(run.delivered).cursor)


def _death(batches: Any, position: Cursor) -> DataError | None:
    workers = getattr(batches, "_workers", None) or []
    closing = wait([worker.sentinel for worker in workers], _PATIENCE) if workers else []
    for worker in workers:
        if worker.sentinel in closing:
            worker.join(_PATIENCE)
    dead = [worker for worker in workers if not worker.is_alive()]
    if not dead:
        return None
    # Till then torch goes on raising for the same deaths, anywhere in the program.
    batches._shutdown_workers()
    codes = ", ".join(str(worker.exitcode) for worker in dead)
    return DataError(
        f"{len(dead)} of the DataLoader's {len(workers)} workers died (exit code {codes}; -9 is often the kernel, out "
        f"of memory). Delivered until then: {position.samples} samples of epoch {position.epoch}, which state_dict "
        "still says. num_workers=0 shows what a worker dies of"
    )

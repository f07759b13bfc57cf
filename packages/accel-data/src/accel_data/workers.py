"""A DataLoader's worker processes: delivery in order, and their state when reading has failed."""

import copy
import warnings
from contextlib import suppress
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any

from accel_data.order.cursor import Cursor
from accel_data.source import Pass
from accel_state.errors import AccelError, DataError

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

    from accel_data.failure_relay import Watch

_PATIENCE = 0.5
"""Seconds for a worker that may be dying to be dead."""
_PATIENCE_AFTER_LOSS = 10.0
"""The same where a connection was lost: a process that dies closes its own a little before it is dead."""
_ATTEMPTS = 3
"""How often torch's handler may break in, for each worker, before it is heard."""


def delivering_in_order(dataloader: "DataLoader[Any]") -> "DataLoader[Any]":
    """A loader whose workers' batches come in the order of its sampler: this one, or a copy that says so.

    What a prepared loader knows is known of an order: a position, the rows repeated to fill the last step, the weight
    of a part of a global batch. With ``in_order=False`` each rank would have delivered other batches than the others,
    and only a message for every batch could tell them which.
    """
    if dataloader.num_workers < 2 or getattr(dataloader, "in_order", True):
        return dataloader
    warnings.warn(
        "in_order=False is not followed: a prepared loader delivers in order, for its position, the repeats in its "
        "last step and the weights of global batches are facts of that order. Against workers that wait for a slow "
        f"sample, raise prefetch_factor (now {dataloader.prefetch_factor})",
        RuntimeWarning,
        stacklevel=2,
    )
    other = copy.copy(dataloader)
    vars(other)["in_order"] = True
    return other


def death_of_workers(run: Pass, error: BaseException | None = None) -> DataError | None:
    """What to raise when workers that read for ``run`` have died; None when all live, or there are none.

    A dead worker shows itself as whatever its parent was just doing: a lost connection, an end of file, a timeout;
    ``error`` is that, if it was an error. The workers that are left are stopped, for there is nobody to read them on.
    """
    batches: Any = run.readers
    patience = _PATIENCE_AFTER_LOSS if _is_loss(error) else _PATIENCE
    for _ in range(_ATTEMPTS * len(getattr(batches, "_workers", None) or ())):
        # torch's handler of SIGCHLD raises wherever the program is, for each worker that dies, and again where any
        # other child ends before it has been asked how.
        with suppress(RuntimeError):
            return _death(batches, run.step(run.delivered).cursor, patience)
    return _death(batches, run.step(run.delivered).cursor, patience)


def _is_loss(error: BaseException | None) -> bool:
    """Whether a connection to a worker was lost; what a worker itself has met comes with a text of torch's."""
    return isinstance(error, EOFError | ConnectionError) and "in DataLoader worker process" not in str(error)


def has_dead_workers(run: Pass) -> bool:
    """Whether a worker that was to read on is dead already; nothing is waited for."""
    with suppress(RuntimeError):
        return bool(_dead(run.readers))
    return True  # torch's handler was faster


def _dead(batches: Any) -> list[Any]:
    """The workers that died. One that has read all of its stream ends too, with 0, and torch notes that it has."""
    workers, reading = getattr(batches, "_workers", None) or [], getattr(batches, "_workers_status", None) or []
    ended = [(worker, reads) for worker, reads in zip(workers, reading, strict=False) if not worker.is_alive()]
    return [worker for worker, reads in ended if reads or worker.exitcode]


def _death(batches: Any, position: Cursor, patience: float) -> DataError | None:
    workers = getattr(batches, "_workers", None) or []
    closing = wait([worker.sentinel for worker in workers], patience) if workers else []
    for worker in workers:
        if worker.sentinel in closing:
            worker.join(patience)
    dead = _dead(batches)
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


def tell(run: Pass, watch: "Watch | None", error: BaseException) -> None:
    """Tells the other ranks of an error that they do not know; raises in its place that workers have died of it."""
    if isinstance(error, GeneratorExit):
        # Of a dead worker torch tells wherever the program is, most often inside the step; that ends the loop.
        if watch is not None and has_dead_workers(run):
            watch.tell(death_of_workers(run) or ChildProcessError("a worker of the DataLoader died"))
    elif isinstance(error, Exception) and not isinstance(error, AccelError):
        death = death_of_workers(run, error) if isinstance(error, OSError | EOFError | RuntimeError) else None
        if watch is not None:
            watch.tell(death or error)
        if death is not None:
            raise death from error

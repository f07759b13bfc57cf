"""Worker processes of a DataLoader: in-order delivery, and detection of dead workers after a failure."""

import re
import warnings
from collections.abc import Iterable
from contextlib import suppress
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any

from accel_data.order.cursor import Cursor
from accel_data.private import copied, shut_down, shut_down_after_pass, workers_of
from accel_data.source import Pass
from accel_state.errors import AccelError, DataError

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

    from accel_data.failure_relay import Watch

_PATIENCE = 0.5
"""Seconds to wait for a worker that may be dying."""
_PATIENCE_AFTER_LOSS = 10.0
"""The same after a lost connection, because a dying process closes its connections a little before it ends."""
_ATTEMPTS = 3
"""Number of interruptions by torch's SIGCHLD handler that are tolerated per worker."""
_KILLED = "-9 is often the kernel, out of memory"
_PIDS = re.compile(r"DataLoader worker \(pid(?:\(s\))? ([\d, ]+)\)")
"""Beginning of torch's messages about workers that have died, of any DataLoader of the process."""


def delivering_in_order(dataloader: "DataLoader[Any]") -> "DataLoader[Any]":
    """Returns the loader, or a copy with ``in_order=True``, so that batches come in the order of its sampler.

    Positions, padding of the last step and weights of micro-batches are facts of that order. With ``in_order=False``
    each rank would deliver batches in an order of its own, which the other ranks would need a message per batch for.
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
    return copied(dataloader, in_order=True)


def death_of_workers(run: Pass, error: BaseException | None = None) -> DataError | None:
    """Returns the error for workers of ``run`` that have died; None if all are alive, or if there are none.

    The death of a worker appears as an error of the operation that its parent was in (a lost connection, an end of
    file, a timeout), which is ``error``. The remaining workers are stopped, because the loop cannot continue.
    """
    batches: Any = run.readers
    patience = _PATIENCE_AFTER_LOSS if _is_loss(error) else _PATIENCE
    for _ in range(_ATTEMPTS * len(workers_of(batches))):
        # torch's SIGCHLD handler raises at any point of the program, for each dead worker, and again whenever another
        # child ends before its exit status is read.
        with suppress(RuntimeError):
            return _death(batches, run.step(run.delivered).cursor, patience, error)
    return _death(batches, run.step(run.delivered).cursor, patience, error)


def _is_loss(error: BaseException | None) -> bool:
    """Whether a connection to a worker was lost; an error raised inside a worker has torch's text about the worker."""
    return isinstance(error, EOFError | ConnectionError) and "in DataLoader worker process" not in str(error)


def has_dead_workers(run: Pass) -> bool:
    """Whether a worker with data left to read is dead already; does not wait."""
    with suppress(RuntimeError):
        return bool(_dead(run.readers))
    return True  # torch's handler was faster


def _dead(batches: Any) -> list[Any]:
    """Returns the dead workers, except those that ended with status 0 after the end of their stream."""
    ended = [(worker, reads) for worker, reads in workers_of(batches) if not worker.is_alive()]
    return [worker for worker, reads in ended if reads or worker.exitcode]


def _death(batches: Any, position: Cursor, patience: float, error: BaseException | None) -> DataError | None:
    workers = [worker for worker, _ in workers_of(batches)]
    closing = wait([worker.sentinel for worker in workers], patience) if workers else []
    for worker in workers:
        if worker.sentinel in closing:
            worker.join(patience)
    dead = _dead(batches)
    if dead:
        codes = ", ".join(str(worker.exitcode) for worker in dead)
        who = f"{len(dead)} of the DataLoader's {len(workers)} workers died (exit code {codes}; {_KILLED})"
    elif _names_one_of(workers, error):
        # Whoever else reads the exit status of a child leaves none for the worker's own process object.
        who = f"one of the DataLoader's workers died ({str(error).strip()})"
    else:
        return None
    # Before the shutdown torch keeps raising for the same deaths, at any point of the program.
    shut_down(batches)
    return DataError(
        f"{who}. Delivered until then: {position.samples} samples of epoch {position.epoch}, which state_dict still "
        "says. num_workers=0 shows what a worker dies of"
    )


def _names_one_of(workers: Iterable[Any], error: BaseException | None) -> bool:
    """Whether torch's error is about the death of one of these workers; its handler raises for those of all loaders."""
    found = _PIDS.match(str(error)) if isinstance(error, RuntimeError) else None
    return found is not None and not {worker.pid for worker in workers}.isdisjoint(map(int, found[1].split(",")))


def tell(run: Pass, watch: "Watch | None", error: BaseException) -> None:
    """Reports a new error to the other ranks; raises an error about dead workers in its place if they caused it.

    The workers of the pass, which is over, are stopped. An iterator that is collected with its traceback takes 5 s for
    each, because the collector has closed its queues by then.
    """
    if isinstance(error, GeneratorExit):
        # torch raises for a dead worker at any point of the program, most often inside the step, which ends the loop.
        if watch is not None and has_dead_workers(run):
            watch.tell(death_of_workers(run) or ChildProcessError("a worker of the DataLoader died"))
    elif isinstance(error, Exception):
        if not isinstance(error, AccelError):
            death = death_of_workers(run, error) if isinstance(error, OSError | EOFError | RuntimeError) else None
            if watch is not None:
                watch.tell(death or error)
            if death is not None:
                raise death from error
        shut_down_after_pass(run.readers)

"""Search for the largest micro-batch that fits into memory."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from accel_backends.roles.lost_step import LostStepError
from accel_state.errors import ConfigError

if TYPE_CHECKING:
    from accel_backends.core.backend import Backend
    from accel_state.session import Session

Compute = Callable[[Any], torch.Tensor]


def find_micro_batch_size(
    backend: "Backend",
    session: "Session",
    models: Sequence[nn.Module],
    compute: Compute,
    batch: Any,
    *,
    smallest: int,
) -> int:
    """Halves ``batch`` until a step of ``compute`` with its backward fits into memory on all ranks; returns its rows.

    Gradients, buffers and random states of ``models`` are as before. Call it between two steps.

    Collective: every rank of the group must call this.

    Raises:
        ConfigError: ``batch`` has fewer than ``smallest`` rows, or not even these fit on every rank.
    """
    from accel_state.collectives.tensors import agree
    from accel_state.device.memory import clear_device_cache
    from accel_state.pytree.operations import find_batch_size, slice_tensors

    rows = find_batch_size(batch)
    if rows is None or rows < smallest:
        raise ConfigError(f"batch has {rows} rows; expected at least smallest={smallest}, as tensors")
    size: int = rows
    while True:
        fits, problem = _try_step(backend, session, models, compute, slice_tensors(batch, slice(0, size)))
        clear_device_cache(garbage_collection=True)
        if session.group is not None and session.world_size > 1:
            agree(problem, group=session.group)
        if problem is not None:
            raise problem
        if fits:
            return size
        if size == smallest:
            raise ConfigError(f"not even {smallest} rows of the batch fit into memory on every process")
        size = max(size // 2, smallest)


class _LeftTogether(Exception):
    """Another rank has failed in the step that this rank tries."""


def _try_step(
    backend: "Backend", session: "Session", models: Sequence[nn.Module], compute: Compute, batch: Any
) -> tuple[bool, Exception | None]:
    """Returns whether a step fits on all ranks, and any other error of the step on this rank.

    Ranks vote before each collective of the step and at its end. A rank that fails votes no and leaves the step, and
    the others leave it where they vote next; every rank has then voted equally often.

    Collective: every rank of the group must call this.

    Raises:
        LostStepError: the step failed, and the backend cannot continue after it.
    """
    from accel_state.device.memory import should_reduce_batch_size
    from accel_state.watchdog.decorator import unrecorded

    def go_on() -> None:
        if not _all(session, True):
            raise _LeftTogether

    problem: Exception | None = None
    with ExitStack() as stack:
        for model in models:
            stack.enter_context(_unchanged(backend, model))
            stack.enter_context(backend.no_sync(model))
        stack.enter_context(unrecorded())
        try:
            with ExitStack() as trials:
                for model in models:
                    trials.enter_context(backend.gradients.trial(model, go_on))
                backend.backward(compute(batch))
        except LostStepError:
            raise
        except _LeftTogether:
            fits = False
        except Exception as error:
            problem = None if should_reduce_batch_size(error) else error
            fits = _all(session, False)
        else:
            fits = _all(session, True)
    return fits, problem


def _all(session: "Session", fits: bool) -> bool:
    """Whether a step fits on this rank and on all others.

    Collective: every rank of the group must call this.
    """
    if session.group is None or session.world_size == 1:
        return fits
    import torch.distributed as dist

    vote = torch.full((), int(fits), device=session.device.own_numbers)
    dist.all_reduce(vote, dist.ReduceOp.MIN, group=session.group)
    return bool(vote.item())


@contextmanager
def _unchanged(backend: "Backend", model: nn.Module) -> Iterator[None]:
    """Restores gradients, buffers and random state; disables DDP's buffer broadcast, as single ranks may fail.

    Gradients are not restored after an error, because other ranks may still be in the step.
    """
    from accel_state.rng import rng_state, set_rng_state

    random = rng_state()
    gradients = backend.gradients.unreduced(model)
    backend.gradients.set_unreduced(model, {})
    sending = [module for module in model.modules() if getattr(module, "broadcast_buffers", False)]
    for module in sending:
        module.broadcast_buffers = False  # type: ignore[assignment]
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        for module in sending:
            module.broadcast_buffers = True  # type: ignore[assignment]
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
        set_rng_state(random, strict=False)
    backend.gradients.set_unreduced(model, gradients)

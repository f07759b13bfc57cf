"""Search for the largest micro-batch that fits into memory."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from accel_state.errors import ConfigError

if TYPE_CHECKING:
    from accel.loop.accumulator import StepClock
    from accel_backends import Backend
    from accel_state.session import Session

Compute = Callable[[Any], torch.Tensor]


def find_micro_batch_size(
    backend: "Backend",
    session: "Session",
    clock: "StepClock",
    models: Sequence[nn.Module],
    compute: Compute,
    batch: Any,
    *,
    smallest: int,
) -> int:
    """See ``Accelerator.find_micro_batch_size``.

    Collective: every rank of the group must call this.
    """
    from accel_state.collectives.tensors import agree, reduce
    from accel_state.device.memory import clear_device_cache
    from accel_state.pytree.operations import find_batch_size, slice_tensors

    rows = find_batch_size(batch)
    if rows is None or rows < smallest:
        raise ConfigError(f"batch has {rows} rows; expected at least smallest={smallest}, as tensors")
    if clock.open:
        raise ConfigError("find_micro_batch_size was called inside an accumulation window; call it between steps")
    size: int = rows
    while True:
        fits, problem = _try_step(backend, models, compute, slice_tensors(batch, slice(0, size)))
        clear_device_cache(garbage_collection=True)
        if session.group is not None and session.world_size > 1:
            agree(problem, group=session.group)
            told = torch.tensor(int(fits), device=session.device.own_numbers)
            fits = bool(reduce(told, "min", group=session.group).item())
        if problem is not None:
            raise problem
        if fits:
            return size
        if size == smallest:
            raise ConfigError(f"not even {smallest} rows of the batch fit into memory on every process")
        size = max(size // 2, smallest)


def _try_step(
    backend: "Backend", models: Sequence[nn.Module], compute: Compute, batch: Any
) -> tuple[bool, Exception | None]:
    """Returns whether a step fits on this rank, and any other error of the step."""
    from accel_state.device.memory import should_reduce_batch_size

    with ExitStack() as stack:
        for model in models:
            stack.enter_context(_unchanged(backend, model))
            stack.enter_context(backend.no_sync(model))
        try:
            backend.backward(compute(batch))
        except Exception as error:
            return False, None if should_reduce_batch_size(error) else error
    return True, None


@contextmanager
def _unchanged(backend: "Backend", model: nn.Module) -> Iterator[None]:
    """Restores gradients, buffers and random state; disables DDP's buffer broadcast, as single ranks may fail."""
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
        backend.gradients.set_unreduced(model, gradients)
        for module in sending:
            module.broadcast_buffers = True  # type: ignore[assignment]
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
        set_rng_state(random, strict=False)

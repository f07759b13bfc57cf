"""Search for the largest micro-batch that fits into memory."""

from abc import ABC
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from accel.loop.accumulator import StepClock
from accel_state.errors import ConfigError

if TYPE_CHECKING:
    from accel_backends import Backend
    from accel_state.session import Session


class MemoryFacet(ABC):
    """Tries a step on all ranks together, and restores the state afterwards."""

    session: "Session"
    clock: StepClock
    backend: "Backend"
    _models: list[nn.Module]

    def find_micro_batch_size(self, compute: Callable[[Any], torch.Tensor], batch: Any, *, smallest: int = 1) -> int:
        """Returns the largest micro-batch, of ``batch`` or a half, a quarter... of it, that fits on every rank.

        ``compute`` returns the loss of a batch with the prepared models; its forward and backward are tried with the
        first rows of ``batch`` (tensors in any nesting). Pass the result to the DataLoader, and the batch size that
        training needs to ``DataLoaderConfiguration(global_batch_size=...)``: accumulation then compensates smaller
        micro-batches, so the steps are the same whatever the memory is. Optimizer states do not exist before the first
        step; try with a batch somewhat larger than the remaining memory would hold. Call it between steps; weights,
        buffers, gradients and random state are restored.

        Collective: every rank of the group must call this.

        Raises:
            ConfigError: not even ``smallest`` rows fit, or an accumulation window is open.
        """
        from accel_state.collectives.tensors import agree, reduce
        from accel_state.device.memory import clear_device_cache
        from accel_state.pytree.operations import find_batch_size, slice_tensors

        rows = find_batch_size(batch)
        if rows is None or rows < smallest:
            raise ConfigError(f"batch has {rows} rows; expected at least smallest={smallest}, as tensors")
        if self.clock.open:
            raise ConfigError("find_micro_batch_size was called inside an accumulation window; call it between steps")
        size: int = rows
        while True:
            fits, problem = self._try_step(compute, slice_tensors(batch, slice(0, size)))
            clear_device_cache(garbage_collection=True)
            if self.session.group is not None and self.session.world_size > 1:
                agree(problem, group=self.session.group)
                told = torch.tensor(int(fits), device=self.session.device.own_numbers)
                fits = bool(reduce(told, "min", group=self.session.group).item())
            if problem is not None:
                raise problem
            if fits:
                return size
            if size == smallest:
                raise ConfigError(f"not even {smallest} rows of the batch fit into memory on every process")
            size = max(size // 2, smallest)

    def _try_step(self, compute: Callable[[Any], torch.Tensor], batch: Any) -> tuple[bool, Exception | None]:
        """Returns whether a step fits on this rank, and any other error of the step."""
        from accel_state.device.memory import should_reduce_batch_size

        with ExitStack() as stack:
            for model in self._models:
                stack.enter_context(self._unchanged(model))
                stack.enter_context(self.backend.no_sync(model))
            try:
                self.backend.backward(compute(batch))
            except Exception as error:
                if should_reduce_batch_size(error):
                    return False, None
                return False, error
        return True, None

    @contextmanager
    def _unchanged(self, model: nn.Module) -> Iterator[None]:
        """Restores gradients, buffers and random state; disables DDP's buffer broadcast, as single ranks may fail."""
        from accel_state.rng import rng_state, set_rng_state

        random = rng_state()
        gradients = self.backend.gradients.unreduced(model)
        self.backend.gradients.set_unreduced(model, {})
        sending = [module for module in model.modules() if getattr(module, "broadcast_buffers", False)]
        for module in sending:
            module.broadcast_buffers = False  # type: ignore[assignment]
        buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
        try:
            yield
        finally:
            self.backend.gradients.set_unreduced(model, gradients)
            for module in sending:
                module.broadcast_buffers = True  # type: ignore[assignment]
            with torch.no_grad():
                for buffer, before in buffers:
                    buffer.copy_(before)
            set_rng_state(random, strict=False)

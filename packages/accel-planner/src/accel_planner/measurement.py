"""Measured memory of a step, for comparison with a plan."""

import gc
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from accel_backends.ops.footprint import Held, storage_bytes


@final
@dataclass(frozen=True, slots=True)
class Measured:
    """Measured bytes of one rank.

    Attributes:
        parameters: storages of the parameters (of this rank's shards).
        gradients: storages of their gradients, before they are cleared.
        optimizer: storages of the optimizer's states.
        peak: peak of all tensors together within a step.
    """

    parameters: int
    gradients: int
    optimizer: int
    peak: int


@final
@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """Training run to be measured: ``compute`` does a forward and backward, ``optimizer`` steps and clears.

    ``held`` returns the backend's parameters, gradients and states; None: those of the model and the optimizer.
    """

    model: nn.Module
    optimizer: Any
    compute: Callable[[], object]
    held: Callable[[], Held] | None = None

    @property
    def tensors(self) -> Held:
        """Returns the current parameters, gradients and states."""
        if self.held is not None:
            return self.held()
        return Held.of(self.model, getattr(self.optimizer, "optimizer", self.optimizer))


def measure(run: MeasuredStep, *, steps: int = 3, extra: Iterable[torch.Tensor] = ()) -> Measured:
    """Measures the memory of this process's tensors in a step, after two warm-up steps.

    CPU allocators keep no statistics. There, memory that persists between steps is counted tensor by tensor, and
    temporary memory is taken from the allocations that torch's profiler reports, including copies that collectives
    make. Memory that another thread frees is not reported, so the lowest peak of ``steps`` is taken. Memory that a
    library allocates without the allocator is not seen. Accelerators are measured by their allocator's statistics.

    Args:
        extra: further tensors that are allocated and that only the caller knows, such as a batch.
    """
    for _ in range(2):  # the first step makes the optimizer's states, the second makes DDP's final buckets
        _step(run)
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
        torch.accelerator.reset_peak_memory_stats()
        parts = _step(run)
        torch.accelerator.synchronize()
        return Measured(*parts, peak=torch.accelerator.max_memory_allocated())
    resident = _resident(run, extra)
    peaks = []
    for _ in range(steps):
        parts, highest = _profiled(run)
        peaks.append(resident + highest)
    return Measured(*parts, peak=min(peaks))


def _step(run: MeasuredStep) -> tuple[int, int, int]:
    run.compute()
    gradients = storage_bytes(run.tensors.gradients)
    run.optimizer.step()
    held = run.tensors
    parameters = storage_bytes(held.parameters)
    # An optimizer may update views of the model's own memory, which must not be counted twice.
    found = parameters, gradients, storage_bytes([*held.parameters, *held.optimizer]) - parameters
    del held
    run.optimizer.zero_grad()
    return found


def _resident(run: MeasuredStep, extra: Iterable[torch.Tensor]) -> int:
    """Bytes allocated between two steps."""
    gc.collect()
    held = run.tensors
    buckets = 0
    if any(isinstance(module, DistributedDataParallel) for module in run.model.modules()):
        buckets = sum(p.numel() * p.dtype.itemsize for p in run.model.parameters() if p.requires_grad)
    lasting = [*held.parameters, *held.gradients, *held.optimizer, *held.reserved]
    return storage_bytes([*lasting, *run.model.buffers(), *extra]) + buckets


def _profiled(run: MeasuredStep) -> tuple[tuple[int, int, int], int]:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        parts = _step(run)
    return parts, highest_allocation(profiler)


def highest_allocation(profiler: Any) -> int:
    """Highest sum of the allocations that are live at once, in bytes, as a profile with ``profile_memory`` has them.

    An allocation at an occupied address means an unreported release.
    """
    changes: list[tuple[int, int, int]] = []
    pending = list(profiler.profiler.kineto_results.experimental_event_tree())
    while pending:
        event = pending.pop()
        pending += event.children
        if event.typed[0].name == "Allocation":
            changes.append((event.start_time_ns, event.typed[1].ptr, event.typed[1].alloc_size))
    live: dict[int, int] = {}
    held = highest = 0
    for _, address, size in sorted(changes):
        held -= live.pop(address, 0)
        if size > 0:
            live[address] = size
            held += size
        highest = max(highest, held)
    return highest

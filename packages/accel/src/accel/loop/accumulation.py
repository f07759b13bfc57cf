"""Gradient accumulation: makes the gradients of micro-batches on all ranks equal those of one global batch."""

from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from accel.loop.accumulator import StepClock
from accel.loop.window import AccumulationWindow

Weight = float | int | torch.Tensor


class Averager(Protocol):
    """Interface of a backend's gradients: over how many ranks, and over which group, they are averaged."""

    @property
    def ranks(self) -> int: ...
    @property
    def group(self) -> Any: ...
    def scale(self, models: Iterable[nn.Module], factor: float | torch.Tensor) -> None: ...


def correct_short_window(clock: StepClock, models: Iterable[nn.Module], over: Averager) -> None:
    """Rescales the gradients of a window that ended earlier than expected.

    Its micro-batches were scaled for the expected length; further backwards of the same micro-batch are scaled
    correctly from the start.
    """
    over.scale(models, clock.correction)
    clock.share *= clock.correction
    clock.correction = 1.0


def weighted_scale(
    window: AccumulationWindow, weight: Weight, over: Averager, device: torch.device
) -> torch.Tensor | float:
    """Factor of a summed loss before the backward, given the averaging group; adds ``weight`` to the window.

    Sums are divided by a power of two near the total weight of the previous window, so that half-precision gradients
    have the size that a mean loss gives them. The first window estimates its total weight from its first micro-batch,
    with one small all-reduce. ``normalise`` replaces the power of two by the exact weight; a power of two does not
    round the result.
    """
    added = weight_on(device, weight)
    if window.denominator is None:
        if window.reference is None:
            first = added * window.size
            window.reference = _power_of_two(_summed(first, over))
        window.denominator = window.reference
    window.weight = added if window.weight is None else window.weight + added
    return over.ranks / window.denominator


def weight_on(device: torch.device, weight: Weight) -> torch.Tensor:
    """A weight as a scalar on a device, in the dtype for sums of weights."""
    if isinstance(weight, torch.Tensor):
        return weight.detach().to(device, weight_dtype(device))
    # filled by the device, because a copy from the host would wait for it
    return torch.full((), float(weight), dtype=weight_dtype(device), device=device)


def weight_dtype(device: torch.device) -> torch.dtype:
    """Dtype for sums of weights: float64 if all devices of the type support it, otherwise float32 (mps, Arc GPUs)."""
    return torch.float64 if device.type in ("cpu", "cuda", "xla") else torch.float32


def forget_dropped(
    window: AccumulationWindow, parameters: Iterable[torch.Tensor], optimizers: Iterable[Optimizer]
) -> None:
    """Drops the weights of losses whose gradients were cleared without a step, before the next loss adds its weight.

    Gradients were cleared if every optimizer cleared its own, or if there were gradients and none is left.
    """
    if window.weight is not None:
        everywhere = window.cleared.issuperset(map(id, optimizers))
        if (window.cleared and everywhere) or (window.seen and all(p.grad is None for p in parameters)):
            window.close()
    window.cleared.clear()


def normalise(window: AccumulationWindow, models: Iterable[nn.Module], over: Averager) -> None:
    """Divides the gradients by the window's total weight over all ranks.

    It may run several times in one window (a second loss of the last micro-batch): each call replaces the previous
    denominator. If the total weight is 0, the gradients of the zero losses are kept.

    Collective: every rank of the group must call this. It is local if no other rank averages gradients with this one.
    """
    total, before = window.weight, window.denominator
    assert isinstance(total, torch.Tensor)  # the last loss has added its weight
    assert before is not None
    total = _summed(total, over)
    total = torch.where(total > 0, total, torch.ones_like(total))
    models = list(models)
    over.scale(models, before / total)
    window.denominator, window.reference = total, _power_of_two(total)
    window.seen = any(p.grad is not None for model in models for p in model.parameters())


def _summed(weight: torch.Tensor, over: Averager) -> torch.Tensor:
    """Weight summed over the ranks that average gradients."""
    if over.ranks == 1:
        return weight
    from accel_state.collectives.tensors import reduce

    total: torch.Tensor = reduce(weight, reduction="sum", group=over.group)
    return total


def _power_of_two(weight: torch.Tensor) -> torch.Tensor:
    """The power of two nearest to a weight, on its device; 1 for weight 0."""
    return torch.where(weight > 0, torch.exp2(torch.round(torch.log2(weight))), torch.ones_like(weight))

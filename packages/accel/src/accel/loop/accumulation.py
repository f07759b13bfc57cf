"""Makes the gradients of many micro-batches, on many ranks, those of one big batch."""

from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from accel.loop.accumulator import AccumulationWindow, StepClock

Weight = float | int | torch.Tensor


class Averager(Protocol):
    """The part of a backend that knows over how many ranks, and which, it averages gradients, and where they are."""

    @property
    def gradient_average(self) -> int: ...
    @property
    def gradient_group(self) -> Any: ...
    def scale_gradients(self, models: Iterable[nn.Module], factor: float | torch.Tensor) -> None: ...


def correct_short_window(clock: StepClock, models: Iterable[nn.Module], over: Averager) -> None:
    """Reweights the gradients of a window that ended earlier than could be known.

    Its micro-batches were weighted for the length that was expected; a second backward of the same micro-batch is
    weighted rightly from the start.
    """
    over.scale_gradients(models, clock.correction)
    clock.share *= clock.correction
    clock.correction = 1.0


def weighted_scale(window: AccumulationWindow, weight: Weight, over: Averager, device: torch.device) -> torch.Tensor:
    """What a summed loss is multiplied with before backward, given who averages gradients; adds its weight.

    Sums are divided by a power of two near the weight of the window before (of this one's first micro-batches, for the
    first: one small collective), so that half-precision gradients have the size that a mean loss gives them.
    ``normalise`` puts the exact weight in its place; a power of two changes no bit of the result.
    """
    added = torch.as_tensor(weight, device=device).detach().to(weight_dtype(device))
    if window.denominator is None:
        if window.reference is None:
            first = added * window.size
            window.reference = _power_of_two(_summed(first, over))
        window.denominator = window.reference
    window.weight = added if window.weight is None else window.weight + added
    return over.gradient_average / window.denominator


def weight_dtype(device: torch.device) -> torch.dtype:
    """The dtype for sums of weights: float64 where all devices of a type have it, otherwise float32 (mps, Arc GPUs)."""
    return torch.float64 if device.type in ("cpu", "cuda", "xla") else torch.float32


def forget_dropped(
    window: AccumulationWindow, parameters: Iterable[torch.Tensor], optimizers: Iterable[Optimizer]
) -> None:
    """Forgets the weights of losses whose gradients were cleared without a step, before the next loss adds its own.

    They were cleared if each of the optimizers cleared its own, or if there were gradients and none is left.
    """
    if window.weight is not None:
        everywhere = window.cleared.issuperset(map(id, optimizers))
        if (window.cleared and everywhere) or (window.seen and all(p.grad is None for p in parameters)):
            window.close()
    window.cleared.clear()


def normalise(window: AccumulationWindow, models: Iterable[nn.Module], over: Averager) -> None:
    """Divides the gradients by the weight of the whole window over all ranks; collective if ranks share the work.

    It may run several times in one window (a second loss of the last micro-batch): each time it replaces the
    denominator that was in use. A window without any weight keeps the gradients of its zero losses.
    """
    total, before = window.weight, window.denominator
    assert total is not None
    assert before is not None
    total = _summed(total, over)
    total = torch.where(total > 0, total, torch.ones_like(total))
    models = list(models)
    over.scale_gradients(models, before / total)
    window.denominator, window.reference = total, _power_of_two(total)
    window.seen = any(p.grad is not None for model in models for p in model.parameters())


def _summed(weight: torch.Tensor, over: Averager) -> torch.Tensor:
    """The weight of all ranks together."""
    if over.gradient_average == 1:
        return weight
    from accel_state.collectives.tensors import reduce

    total: torch.Tensor = reduce(weight, reduction="sum", group=over.gradient_group)
    return total


def _power_of_two(weight: torch.Tensor) -> torch.Tensor:
    """The power of two nearest to a weight, on its device; 1 for none."""
    return torch.where(weight > 0, torch.exp2(torch.round(torch.log2(weight))), torch.ones_like(weight))

"""Makes the gradients of many micro-batches, on many ranks, those of one big batch."""

from collections.abc import Iterable

import torch
from torch import nn

from accel.clock import StepClock, Window
from accel_state import collectives

Weight = float | int | torch.Tensor


def correct_short_window(clock: StepClock, models: Iterable[nn.Module]) -> None:
    """Reweights the gradients of a window that ended earlier than could be known.

    Its micro-batches were weighted for the length that was expected; a second backward of the same micro-batch is
    weighted rightly from the start.
    """
    scale_gradients(models, clock.correction)
    clock.share *= clock.correction
    clock.correction = 1.0


def weighted_scale(window: Window, ranks: int) -> Weight:
    """What a summed loss is multiplied with before backward, when a backend averages over ``ranks``."""
    if window.denominator is None:
        return ranks
    assert isinstance(window.denominator, torch.Tensor)
    return ranks / window.denominator


def add_weight(window: Window, weight: Weight, device: torch.device) -> None:
    """Adds what one micro-batch weighs (its tokens or samples; 0 is fine) to the window's sum on this rank."""
    dtype = torch.float32 if device.type == "mps" else torch.float64
    added = torch.as_tensor(weight, device=device).detach().to(dtype)
    before = window.weight
    assert before is None or isinstance(before, torch.Tensor)
    window.weight = added if before is None else before + added


def normalise(window: Window, models: Iterable[nn.Module], *, collective: bool) -> None:
    """Divides the gradients by the weight of the whole window over all ranks; collective if ranks share the work.

    It may run several times in one window (a second loss of the last micro-batch): each time it replaces the
    denominator that was in use. A window without any weight keeps the gradients of its zero losses.
    """
    total = window.weight
    assert isinstance(total, torch.Tensor)
    if collective:
        total = collectives.reduce(total, reduction="sum")
    total = torch.where(total > 0, total, torch.ones_like(total))
    before = window.denominator
    assert before is None or isinstance(before, torch.Tensor)
    scale_gradients(models, 1.0 / total if before is None else before / total)
    window.denominator = total


def scale_gradients(models: Iterable[nn.Module], factor: float | torch.Tensor) -> None:
    """Multiplies every gradient of the models in place, a tied one once."""
    gradients = {id(p.grad): p.grad for model in models for p in model.parameters() if p.grad is not None}
    by_dtype: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for gradient in gradients.values():
        by_dtype.setdefault((gradient.dtype, gradient.device), []).append(gradient)
    for (dtype, device), group in by_dtype.items():
        if isinstance(factor, torch.Tensor):
            torch._foreach_mul_(group, factor.to(device=device, dtype=dtype))
        else:
            torch._foreach_mul_(group, factor)

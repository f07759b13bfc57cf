"""Backward and step with a loss scale; refuses unscaled gradients, and sums of scaled and unscaled ones."""

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from accel_backends.ops.clip import Names
from accel_backends.ops.fqn import few
from accel_precision.scaler import LossScaler
from accel_state.errors import BackendError


def scaled_backward(scaler: LossScaler, backward: Callable[[float], None]) -> None:
    """Calls ``backward`` with the loss scale as factor.

    Raises:
        PrecisionError: scaled gradients were added to unscaled ones.
    """
    scaler.overflow_dropped()
    waiting = scaler.unscaled_gradients()
    backward(scaler.for_loss())
    scaler.check_unscaled(waiting)


def scaled_step(scaler: LossScaler, optimizer: Optimizer, closure: Callable[[], Any] | None, *, names: Names) -> bool:
    """Steps unless gradients overflowed; returns whether the optimizer stepped.

    Raises:
        BackendError: see ``check_scaled``.
    """
    if closure is None:
        check_scaled(scaler, optimizer, names)
        return scaler.step(optimizer)

    def checked() -> Any:
        loss = closure()
        check_scaled(scaler, optimizer, names)
        return loss

    return scaler.step(optimizer, checked)


def check_scaled(scaler: LossScaler, optimizer: Optimizer, names: Names) -> None:
    """Verifies that an optimizer's gradients carry the loss scale, by which the step divides them.

    Raises:
        BackendError: the gradients are of a ``loss.backward()`` without the loss scale.
    """
    if not scaler.lacks_scale(optimizer):
        return
    known = names()
    parameters: list[torch.Tensor] = [p for group in optimizer.param_groups for p in group["params"]]
    held = [known.get(id(parameter), "?") for parameter in parameters if parameter.grad is not None]
    raise BackendError(
        f"the gradients of {type(optimizer).__name__} ({few(held, 3)}) are of a loss without the fp16 loss scale, "
        "by which they would be divided: loss.backward() was called where accelerator.backward(loss) is needed"
    )

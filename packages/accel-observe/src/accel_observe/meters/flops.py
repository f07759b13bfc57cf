"""Floating-point operations of a model, and the peak rate of a device."""

from collections.abc import Callable
from typing import Any

from accel_state.device.device import Device
from accel_state.device.products import product_of


def count_flops(forward: Callable[[], Any], *, backward: bool = True) -> int:
    """Floating-point operations of ``forward()``, which returns a loss, and of its backward; as torch counts them.

    Runs both once, for real, so the backward accumulates into the parameters' gradients. Matrix products, convolutions
    and attention count, with two operations for each multiply-add; elementwise operations do not.
    """
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        loss = forward()
        if backward:
            loss.backward()
    return int(counter.get_total_flops())


def peak_flops(device: Device | str) -> float | None:
    """Peak bf16 FLOP/s of a device of this process, or of the current device of a type; None if it is not known.

    The rates are those of ``accel_state.device.products``; a slice (MIG) of a product has none.
    """
    product = product_of(Device.parse(device).product_name())
    return None if product is None else product.flops

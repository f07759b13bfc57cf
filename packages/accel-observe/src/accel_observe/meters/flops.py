"""Floating-point operations of a model, and the rate that a device could reach."""

from collections.abc import Callable
from typing import Any

# Dense bf16, multiply and add counted as two: the vendors' data sheets. First match of the device's name counts.
_PEAKS = (
    ("H200", 989e12),
    ("H100 PCIe", 756e12),
    ("H100 NVL", 835e12),
    ("H100", 989e12),
    ("B200", 2250e12),
    ("A100", 312e12),
    ("A10G", 70e12),
    ("L40S", 362e12),
    ("L4", 121e12),
    ("V100", 125e12),
    ("T4", 65e12),
    ("MI300X", 1307e12),
    ("MI250X", 191.5e12),
)


def count_flops(forward: Callable[[], Any], *, backward: bool = True) -> int:
    """Floating-point operations of ``forward()``, which gives a loss, and of its backward; as torch counts them.

    It runs once, for real, and leaves no gradients behind where there were none: matrix products, convolutions and
    attention count, two for each multiplication with its addition; elementwise operations do not.
    """
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        loss = forward()
        if backward:
            loss.backward()
    return int(counter.get_total_flops())


def peak_flops(device_type: str) -> float | None:
    """What one device of this process could do at most, in bf16 operations a second; None where nobody told us."""
    import torch

    if device_type != "cuda":
        return None
    name = torch.cuda.get_device_name()
    return next((peak for part, peak in _PEAKS if part in name), None)

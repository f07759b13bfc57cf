"""Floating-point operations of a model, and the peak rate of a device."""

import re
from collections.abc import Callable
from typing import Any

# Dense bf16 FLOP/s of the vendors' data sheets (a multiply-add counts as two). The first match of the device's name
# counts.
_PEAKS = (
    ("GB200", 2250e12),
    ("GH200", 989e12),
    ("H200", 989e12),
    ("H100 PCIe", 756e12),
    ("H100 NVL", 835e12),
    ("H100", 989e12),
    ("B200", 2250e12),
    ("A100", 312e12),
    ("A10G", 70e12),
    ("L40S", 362e12),
    ("L40", 181e12),
    ("L4", 121e12),
    ("V100", 125e12),
    ("T4", 65e12),
    ("MI300X", 1307e12),
    ("MI250X", 191.5e12),
)


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


def peak_flops(device_type: str) -> float | None:
    """Peak bf16 FLOP/s of one device of this process; None for a device that is not in the table."""
    import torch

    if device_type != "cuda":
        return None
    return peak_of(torch.cuda.get_device_name())


def peak_of(name: str) -> float | None:
    """Peak bf16 FLOP/s of the product with this name; None for others, and for a slice (MIG) of one.

    The name has to hold the product's as words: an L40 is no L4.
    """
    words = re.split(r"[^A-Z0-9]+", name.upper())
    if "MIG" in words:
        return None
    return next((peak for part, peak in _PEAKS if set(part.upper().split()).issubset(words)), None)

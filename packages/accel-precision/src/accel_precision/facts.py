"""Dtypes that a device supports, found by computing in each of them."""

import warnings
from dataclasses import dataclass
from typing import final

import torch

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
HALVES = (torch.float16, torch.bfloat16)
FP8_LIBRARIES = ("torchao", "transformer_engine")


@final
@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """Precision facts of a device type. Plain data, so that decisions about precision are tested without the device.

    Attributes:
        type: torch's name of the device type ("cpu", "cuda", ...).
        computes: dtypes in which the device multiplies matrices.
        autocasts: dtypes to which ``torch.autocast`` casts on the device.
        fp8: whether the device multiplies 8-bit floats in hardware; otherwise fp8 is emulated (same rounding, no
            speed).
        fp8_libraries: the libraries for fp8 training that are installed.
    """

    type: str = "cpu"
    computes: frozenset[torch.dtype] = frozenset(FLOATS)
    autocasts: frozenset[torch.dtype] = frozenset(HALVES)
    fp8: bool = False
    fp8_libraries: tuple[str, ...] = ()

    @classmethod
    def probe(cls, device_type: str) -> "DeviceFacts":
        """Multiplies 2x2 matrices in every dtype on the device, with and without autocast.

        XLA and meta devices are not probed, their facts are constants: on XLA each probe would be a compilation, and
        the meta device computes nothing. Costs less than a millisecond on a CPU.
        """
        if device_type == "xla":
            return cls("xla", frozenset(FLOATS), frozenset({torch.bfloat16}), False, _installed_libraries())
        if device_type == "meta":
            return cls("meta", fp8_libraries=_installed_libraries())
        return cls(
            device_type,
            frozenset(dtype for dtype in FLOATS if _multiplies(device_type, dtype)),
            frozenset(dtype for dtype in HALVES if _autocasts(device_type, dtype)),
            _has_fp8(device_type),
            _installed_libraries(),
        )


def _multiplies(device_type: str, dtype: torch.dtype) -> bool:
    try:
        ones = torch.ones(2, 2, dtype=dtype, device=device_type)
        return (ones @ ones).dtype == dtype
    except (RuntimeError, TypeError):  # torch raises these if a kernel or a dtype is missing
        return False


def _autocasts(device_type: str, dtype: torch.dtype) -> bool:
    try:
        ones = torch.ones(2, 2, device=device_type)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns and then computes in fp32, which the dtype shows
            with torch.autocast(device_type, dtype=dtype):
                return (ones @ ones).dtype == dtype
    except (RuntimeError, TypeError):
        return False


def _has_fp8(device_type: str) -> bool:
    """Whether the device has fp8 units: NVIDIA from compute capability 8.9 (Ada, Hopper), AMD gfx94, gfx95, gfx12."""
    if device_type != "cuda" or not torch.cuda.is_available():
        return False
    if torch.version.hip:
        return torch.cuda.get_device_properties().gcnArchName.startswith(("gfx94", "gfx95", "gfx12"))
    return torch.cuda.get_device_capability() >= (8, 9)


def _installed_libraries() -> tuple[str, ...]:
    from importlib.util import find_spec

    return tuple(name for name in FP8_LIBRARIES if find_spec(name) is not None)

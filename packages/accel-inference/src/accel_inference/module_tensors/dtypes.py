"""Bytes of an element of a dtype, and sizes given as text."""

import re
import sys
from collections.abc import Mapping
from math import ceil
from typing import TYPE_CHECKING

from accel_state.enums import CustomDtype

if TYPE_CHECKING:
    import torch

_CUSTOM: Mapping[CustomDtype, float] = {CustomDtype.FP8: 1, CustomDtype.INT4: 1 / 2, CustomDtype.INT2: 1 / 4}
_UNITS = {"": 1, "K": 1, "M": 2, "G": 3, "T": 4}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)([Bb]?)", re.IGNORECASE)


def dtype_byte_size(dtype: "torch.dtype | CustomDtype | str") -> float:
    """Bytes that an element of ``dtype`` takes: 1/8 for bool, fractions for the dtypes of ``CustomDtype``.

    Raises:
        ValueError: ``dtype`` is neither a dtype of torch nor a custom one.
    """
    import torch

    if isinstance(dtype, CustomDtype):
        return _CUSTOM[dtype]
    found = proper_dtype(dtype)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"`dtype` is not a valid dtype: {dtype!r}; expected one like torch.bfloat16 or 'bfloat16'")
    return 1 / 8 if found == torch.bool else found.itemsize


def proper_dtype(dtype: "torch.dtype | str") -> "torch.dtype":
    """The dtype of torch with a name: "float16", "torch.float16" and ``torch.float16`` are one."""
    import torch

    if not isinstance(dtype, str):
        return dtype
    found = getattr(torch, dtype.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"`dtype` is not a valid dtype: {dtype!r}; expected a name like 'bfloat16'")
    return found


def planned_byte_size(
    dtype: "torch.dtype", wanted: "torch.dtype | CustomDtype | str | None", special: "torch.dtype | str | None" = None
) -> float:
    """Bytes of an element of a tensor with ``dtype`` in a model that is loaded in dtype ``wanted``.

    Integers and booleans keep their dtype, and no tensor grows. ``special`` is the dtype of this tensor alone.
    """
    if special is not None:
        return dtype_byte_size(special)
    own = dtype_byte_size(dtype)
    floating = dtype.is_floating_point or dtype.is_complex
    return own if wanted is None or not floating else min(own, dtype_byte_size(wanted))


def tensor_bytes(elements: int, byte_size: float) -> int:
    """Bytes of so many elements, whole."""
    return ceil(elements * byte_size)


def convert_file_size_to_int(size: float | str) -> int:
    """Bytes of a size like "200MiB" (powers of 1024), "1.5GB" (powers of 1000) or "1Gb" (bits), or of a number.

    Raises:
        ValueError: ``size`` is neither a number nor a text like these.
    """
    if not isinstance(size, str):
        return int(min(size, sys.maxsize))  # infinity, too, and numbers of NumPy
    found = _SIZE.fullmatch(size.strip())
    if found is None or (not found[4] and found[2]):
        raise ValueError(
            f"`size` {size!r} is not in a valid format; expected a number with a unit, like '5GB' or '5GiB'"
        )
    number, unit, binary, byte = found.groups()
    if binary and not unit:
        raise ValueError(
            f"`size` {size!r} is not in a valid format; expected a number with a unit, like '5GB' or '5GiB'"
        )
    count = float(number) * (1024 if binary else 1000) ** (_UNITS[unit.upper()] if unit else 0)
    return int(count / 8) if byte == "b" and not binary else int(count)

"""Collectives of a block of code, and the bytes that this rank passes to them, counted by torch's profiler."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def counted_communication() -> Iterator[dict[str, dict[str, int]]]:
    """Counts collectives in the block, and the bytes that this rank passes to them, as torch's profiler sees them.

    The mapping by name is filled when the block ends.
    """
    from torch.profiler import ProfilerActivity, profile

    found: dict[str, dict[str, int]] = {}
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        yield found
    for event in profiler.events() or ():
        library, _, name = event.name.partition(":")
        if library in {"gloo", "nccl", "mpi", "ucc", "xccl"} and name:
            counts = found.setdefault(name, {"calls": 0, "bytes": 0})
            counts["calls"] += 1
            counts["bytes"] += _bytes_of(event)


def _bytes_of(event: Any) -> int:
    """Input bytes of a recorded collective; the profiler records shapes, and dtypes if it knows them."""
    total = 0
    dtypes = list(getattr(event, "input_dtypes", None) or [])
    for position, shape in enumerate(event.input_shapes or ()):
        if isinstance(shape, list | tuple) and all(isinstance(size, int) for size in shape):
            name = dtypes[position] if position < len(dtypes) else "float"
            total += math.prod(shape) * _ITEM_SIZES.get(name, 4)
    return total


# C++ names of dtypes; a dtype of unknown size counts as float.
_ITEM_SIZES = {
    **dict.fromkeys(("bool", "signed char", "unsigned char"), 1),
    **dict.fromkeys(("c10::Float8_e4m3fn", "c10::Float8_e4m3fnuz", "c10::Float8_e5m2", "c10::Float8_e5m2fnuz"), 1),
    **dict.fromkeys(("c10::Half", "c10::BFloat16", "short int"), 2),
    **dict.fromkeys(("float", "int"), 4),
    **dict.fromkeys(("double", "long int", "c10::complex<float>"), 8),
    "c10::complex<double>": 16,
}

"""Human-readable numbers of bytes and of parameters."""

import math


def readable_bytes(count: float, *, at_least: bool = False) -> str:
    """Formats bytes in powers of 1024 with 4 digits: ``1.5 GiB``; ``at_least`` rounds up."""
    size, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if abs(size) < 1024:
            break
        size, unit = size / 1024, larger
    if at_least and size > 0:
        step = 10.0 ** (math.floor(math.log10(size)) - 3)
        size = math.ceil(size / step) * step
    return f"{size:.4g} {unit}"


def readable_count(count: int) -> str:
    """Formats a number, in words from a million on: ``1.24 billion``."""
    for size, word in ((10**12, "trillion"), (10**9, "billion"), (10**6, "million")):
        if count >= size:
            return f"{count / size:.3g} {word}"
    return f"{count:,}"

"""Memory of messages, used again: the system clears each new page, which costs more than filling it."""

import ctypes
import weakref
from typing import Any, final

_WORTH_IT = 256 << 10
"""Smaller blocks come from memory that Python's allocator keeps anyway."""
_MOST_KEPT = 64 << 20
"""Bytes: the messages that a rank has, waits for and is about to take."""


@final
class Blocks:
    """Gives out blocks of bytes, and has each back when the last tensor that looks into it is gone.

    One thread takes; blocks come back from any.
    """

    def __init__(self) -> None:
        self._free: list[bytearray] = []

    def take(self, size: int) -> Any:
        """A writable buffer of ``size`` bytes of any content, for ``torch.frombuffer`` and ``memoryview``."""
        if size < _WORTH_IT:
            return bytearray(size)
        found = next((i for i, block in enumerate(self._free) if size <= len(block) <= 2 * size), None)
        # What is given out is a window, which unlike the block can be seen to die.
        block = bytearray(1 << (size - 1).bit_length()) if found is None else self._free.pop(found)
        window = (ctypes.c_ubyte * size).from_buffer(block)
        weakref.finalize(window, self._give_back, block).atexit = False
        return window

    def _give_back(self, block: bytearray) -> None:
        if sum(map(len, self._free)) + len(block) <= _MOST_KEPT:
            self._free.append(block)

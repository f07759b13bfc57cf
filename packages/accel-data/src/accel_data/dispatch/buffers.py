"""Memory of messages, used again: the system clears each new page, which costs more than filling it."""

import ctypes
import threading
import weakref
from typing import Any, final

_WORTH_IT = 256 << 10
"""Smaller blocks come from memory that Python's allocator keeps anyway."""
_MOST_KEPT = 64 << 20
"""Bytes: the messages that a rank has, waits for and is about to take."""


@final
class Blocks:
    """Gives out blocks of bytes, and has each back when the last tensor that looks into it is gone.

    Blocks are taken by the threads of passes, of which one may be inside another, and come back from any thread.
    """

    def __init__(self) -> None:
        self._free: list[bytearray] = []
        self._taking = threading.Lock()

    def take(self, size: int) -> Any:
        """A writable buffer of ``size`` bytes of any content, for ``torch.frombuffer`` and ``memoryview``."""
        if size < _WORTH_IT:
            return bytearray(size)
        # A block that comes back meanwhile is appended without the lock, which its thread may be holding.
        with self._taking:
            found = next((i for i, block in enumerate(self._free) if size <= len(block) <= 2 * size), None)
            block = None if found is None else self._free.pop(found)
        # What is given out is a window, which unlike the block can be seen to die.
        block = bytearray(1 << (size - 1).bit_length()) if block is None else block
        window = (ctypes.c_ubyte * size).from_buffer(block)
        weakref.finalize(window, self._give_back, block).atexit = False
        return window

    def _give_back(self, block: bytearray) -> None:
        if sum(map(len, self._free)) + len(block) <= _MOST_KEPT:
            self._free.append(block)

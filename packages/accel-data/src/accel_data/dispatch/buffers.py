"""Reused memory blocks for messages, because page faults of new memory cost more than filling it."""

import ctypes
import threading
import weakref
from typing import Any, final

_WORTH_IT = 256 << 10
"""Smaller blocks (in bytes) are allocated normally: Python's allocator reuses that memory anyway."""
_MOST_KEPT = 64 << 20
"""Limit of unused bytes: the messages that a rank holds, receives and is about to take."""


@final
class Blocks:
    """Allocates blocks of bytes, and reuses a block when the last tensor that views it is gone.

    Threads of several passes, possibly nested, allocate blocks; any thread may release one.
    """

    def __init__(self) -> None:
        self._free: list[bytearray] = []
        self._taking = threading.Lock()

    def take(self, size: int) -> Any:
        """Returns an uninitialised writable buffer of ``size`` bytes, for ``torch.frombuffer`` and ``memoryview``."""
        if size < _WORTH_IT:
            return bytearray(size)
        # A block released meanwhile is appended without the lock, because the releasing thread may be holding it.
        with self._taking:
            found = next((i for i, block in enumerate(self._free) if size <= len(block) <= 2 * size), None)
            block = None if found is None else self._free.pop(found)
        # Callers get a window into the block, because a ctypes array supports weak references and a bytearray does not.
        block = bytearray(1 << (size - 1).bit_length()) if block is None else block
        window = (ctypes.c_ubyte * size).from_buffer(block)
        weakref.finalize(window, self._give_back, block).atexit = False
        return window

    def _give_back(self, block: bytearray) -> None:
        if sum(map(len, self._free)) + len(block) <= _MOST_KEPT:
            self._free.append(block)

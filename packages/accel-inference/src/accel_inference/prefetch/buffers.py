"""Buffers in host memory that weights are read into, again and again."""

import mmap
import sys

import torch

from accel_state.device.pinned import pinned_bytes, uses_pinned_memory

_HUGE = 2 * 2**20


class Buffer:
    """Page-aligned memory; its tensors keep the memory, and the buffer knows whether one of them is left."""

    __slots__ = ("_memory", "_references", "nbytes")

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._memory = mmap.mmap(-1, nbytes)
        if nbytes >= _HUGE and hasattr(mmap, "MADV_HUGEPAGE"):
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        self._references = sys.getrefcount(self._memory)

    def view(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor over the bytes at ``offset``."""
        count = torch.Size(shape).numel()
        if not count:
            return torch.empty(shape, dtype=dtype, device="cpu")
        return torch.frombuffer(self._memory, dtype=dtype, count=count, offset=offset).view(shape)

    def bytes_at(self, offset: int, nbytes: int) -> memoryview:
        """Writable bytes at ``offset``; the view must be released before the buffer is recycled."""
        return memoryview(self._memory)[offset : offset + nbytes]

    @property
    def is_unused(self) -> bool:
        """Whether no tensor over this memory is alive: neither a view nor one that autograd saved."""
        return sys.getrefcount(self._memory) <= self._references


class PinnedBuffer:
    """Pinned memory for weights of an accelerator, which are copied to it before the buffer is used again."""

    __slots__ = ("_memory", "nbytes")

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._memory = pinned_bytes(nbytes)

    def view(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor over the bytes at ``offset``."""
        count = torch.Size(shape).numel() * dtype.itemsize
        return self._memory[offset : offset + count].view(dtype).view(shape)

    def bytes_at(self, offset: int, nbytes: int) -> memoryview:
        """Writable bytes at ``offset``."""
        return self._memory[offset : offset + nbytes].numpy().data

    @property
    def is_unused(self) -> bool:
        """Always true: the accelerator has copies of the tensors over this memory."""
        return True


AnyBuffer = Buffer | PinnedBuffer


def new_buffer(nbytes: int, device: torch.device) -> AnyBuffer:
    """A buffer for weights that are used on ``device``."""
    return PinnedBuffer(nbytes) if uses_pinned_memory(device) else Buffer(nbytes)


class BufferPool:
    """Unused buffers by size; new memory costs a page fault for every page that is written first."""

    def __init__(self) -> None:
        self._unused: dict[int, list[AnyBuffer]] = {}
        self.nbytes = 0
        """Bytes of the buffers in the pool."""

    @staticmethod
    def rounded(nbytes: int) -> int:
        """Size of the buffer for so many bytes."""
        return max(-(-nbytes // mmap.PAGESIZE), 1) * mmap.PAGESIZE

    def has(self, nbytes: int) -> bool:
        """Whether there is an unused buffer of the size for ``nbytes``."""
        return bool(self._unused.get(self.rounded(nbytes)))

    def take(self, nbytes: int) -> AnyBuffer | None:
        """An unused buffer of the size for ``nbytes``, if there is one."""
        found = self._unused.get(self.rounded(nbytes))
        if not found:
            return None
        buffer = found.pop()
        self.nbytes -= buffer.nbytes
        return buffer

    def give(self, buffer: AnyBuffer) -> None:
        """Keeps a buffer for the next of its size; one that still has tensors is dropped and ends with them."""
        if buffer.is_unused:
            self._unused.setdefault(buffer.nbytes, []).append(buffer)
            self.nbytes += buffer.nbytes

    def drop(self) -> None:
        """Returns all memory of the pool to the operating system."""
        self._unused.clear()
        self.nbytes = 0

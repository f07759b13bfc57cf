"""Host snapshot: a copy of many tensors into one buffer, at the speed of memory or of an accelerator's link.

torch's own copies start and join a parallel region per tensor, which costs several times the copy itself if other
processes share the CPUs; plain memory moves on a few threads do not.
"""

import ctypes
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import final

import torch

from accel_ckpt.format.tensors import byte_view
from accel_ckpt.io.pinned_ring import PinnedRing, Wait, end_of_stream, flat_bytes
from accel_ckpt.io.thread_pool import run_jobs
from accel_state.device.huge_pages import new_tensor
from accel_state.device.pinned import pin_in_place, uses_pinned_memory

_JOB = 16 * 2**20
_SMALL_JOB = 2 * 2**20
_Job = Callable[[], None]


@final
class HostSnapshot:
    """Buffer of a save's tensors, kept for the next save. Copies on ``threads`` threads; all but one are of ``pool``.

    A first copy from an accelerator passes through a ring of pinned blocks, at the speed at which the CPU empties them
    (15 GB/s on four threads). ``pin`` then pins the buffer, to which accelerators copy at their link's speed (55 GB/s).
    """

    def __init__(self, threads: int, pool: ThreadPoolExecutor) -> None:
        self._copy = partial(copy_into, threads=threads, pool=pool)
        self._buffer: torch.Tensor | None = None
        self._gains_by_pinning = False
        self._unpin: Callable[[], object] | None = None

    def take(self, tensors: Sequence[torch.Tensor]) -> None:
        """Copies the tensors, row-major and one after the other; returns when they may change."""
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        if self._buffer is None or self._buffer.numel() < size:
            self.free()
            self._buffer = new_tensor((size,), torch.uint8)
            self._gains_by_pinning = any(uses_pinned_memory(tensor.device) for tensor in tensors)
        self._copy(self._buffer, tensors, pinned=self._unpin is not None)

    def read(self, size: int) -> memoryview:
        """Returns the first ``size`` bytes of the copies, valid until the next ``take``."""
        assert self._buffer is not None
        return byte_view(self._buffer)[:size]

    def pin(self) -> None:
        """Pins the buffer, once, if tensors of an accelerator were copied to it."""
        if self._gains_by_pinning and self._buffer is not None:
            self._gains_by_pinning = False
            self._unpin = pin_in_place(self._buffer)

    def free(self) -> None:
        """Frees the buffer."""
        if self._unpin is not None:
            self._unpin()
        self._buffer = self._unpin = None


def copy_into(
    buffer: torch.Tensor,
    tensors: Sequence[torch.Tensor],
    *,
    pinned: bool = False,
    threads: int | None = None,
    pool: ThreadPoolExecutor | None = None,
) -> None:
    """Copies the bytes of ``tensors``, row-major and one after the other, to the start of ``buffer`` (uint8, CPU).

    Uses ``threads`` threads, including the calling one; the others come from ``pool``. Accelerators copy straight to a
    buffer that is ``pinned``.
    """
    moves: list[tuple[int, int, int]] = []
    distant: list[tuple[int, torch.Tensor]] = []
    begin = 0
    for tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        if tensor.device.type == "cpu" and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg()):
            moves += _split(buffer.data_ptr() + begin, tensor.data_ptr(), size, _JOB)
        elif uses_pinned_memory(tensor.device):
            distant.append((begin, tensor))
        else:
            buffer[begin : begin + size].view(tensor.dtype).view(tensor.shape).copy_(tensor)
        begin += size
    waits = _begin_copies(buffer, distant) if pinned else ()
    run_jobs(_jobs(moves, _JOB), threads, pool=pool)
    if not pinned:
        _copy_through_ring(buffer, distant, partial(run_jobs, threads=threads, pool=pool))
    for wait in waits:
        wait()


def _begin_copies(buffer: torch.Tensor, placed: Sequence[tuple[int, torch.Tensor]]) -> list[Wait]:
    """Begins the copies of accelerators to their places in a pinned buffer; returns a wait for each device."""
    for begin, tensor in placed:
        content = flat_bytes(tensor)
        buffer[begin : begin + content.numel()].copy_(content, non_blocking=True)
    return [end_of_stream(device) for device in {tensor.device: None for _, tensor in placed}]


def _copy_through_ring(
    buffer: torch.Tensor, placed: Sequence[tuple[int, torch.Tensor]], run: "Callable[[Iterable[_Job]], None]"
) -> None:
    """Copies tensors of accelerators to their places in ``buffer``; returns when the bytes are there."""
    views = PinnedRing().to_host([tensor for _, tensor in placed])
    for begin, tensor in placed:
        end = begin + tensor.numel() * tensor.element_size()
        while begin < end:
            view = next(views)
            source = ctypes.addressof(ctypes.c_char.from_buffer(view))
            run(_jobs(_split(buffer.data_ptr() + begin, source, len(view), _SMALL_JOB), _SMALL_JOB))
            begin += len(view)


def _split(target: int, source: int, size: int, job: int) -> list[tuple[int, int, int]]:
    """Splits a move of ``size`` bytes between two addresses into moves of at most ``job`` bytes."""
    return [(target + at, source + at, min(job, size - at)) for at in range(0, size, job)]


def _jobs(moves: Sequence[tuple[int, int, int]], job: int) -> "Iterator[_Job]":
    """Groups moves into jobs of about ``job`` bytes."""
    group: list[tuple[int, int, int]] = []
    size = 0
    for move in moves:
        group.append(move)
        size += move[2]
        if size >= job:
            yield lambda group=group: _move(group)  # type: ignore[misc]
            group, size = [], 0
    if group:
        yield lambda: _move(group)


def _move(moves: Sequence[tuple[int, int, int]]) -> None:
    for target, source, size in moves:
        ctypes.memmove(target, source, size)

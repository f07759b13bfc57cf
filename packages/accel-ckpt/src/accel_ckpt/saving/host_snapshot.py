"""Host snapshot: a copy of many tensors into one buffer, at memory speed.

torch's own copies start and join a parallel region per tensor, which costs several times the copy itself if other
processes share the CPUs; plain memory moves on a few threads do not.
"""

import ctypes
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch

from accel_ckpt.io.pinned_ring import PinnedRing
from accel_ckpt.io.thread_pool import run_jobs
from accel_state.device.pinned import uses_pinned_memory

_JOB = 16 * 2**20
_SMALL_JOB = 2 * 2**20
_Job = Callable[[], None]


def copy_into(
    buffer: torch.Tensor,
    tensors: Sequence[torch.Tensor],
    *,
    threads: int | None = None,
    pool: ThreadPoolExecutor | None = None,
) -> None:
    """Copies the bytes of ``tensors``, row-major and one after the other, to the start of ``buffer`` (uint8, CPU).

    Uses ``threads`` threads, including the calling one; the others come from ``pool``.
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
    run_jobs(_jobs(moves, _JOB), threads, pool=pool)
    _copy_through_ring(buffer, distant, partial(run_jobs, threads=threads, pool=pool))


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

"""Host snapshot: a copy of many tensors into one buffer, at memory speed.

torch's own copies start and join a parallel region per tensor, which costs several times the copy itself if other
processes share the CPUs; plain memory moves on a few threads do not.
"""

import ctypes
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from accel_ckpt.io.thread_pool import run_jobs

_JOB = 16 * 2**20


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
    begin = 0
    for tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        if tensor.device.type == "cpu" and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg()):
            moves += [
                (buffer.data_ptr() + begin + at, tensor.data_ptr() + at, min(_JOB, size - at))
                for at in range(0, size, _JOB)
            ]
        else:
            target = buffer[begin : begin + size].view(tensor.dtype).view(tensor.shape)
            target.copy_(tensor, non_blocking=True)
        begin += size
    run_jobs(_jobs(moves), threads, pool=pool)
    if any(tensor.device.type != "cpu" for tensor in tensors):
        torch.accelerator.synchronize()


def _jobs(moves: Sequence[tuple[int, int, int]]) -> Iterator[Callable[[], None]]:
    """Groups moves into jobs of about ``_JOB`` bytes."""
    group: list[tuple[int, int, int]] = []
    size = 0
    for move in moves:
        group.append(move)
        size += move[2]
        if size >= _JOB:
            yield lambda group=group: _move(group)  # type: ignore[misc]
            group, size = [], 0
    if group:
        yield lambda: _move(group)


def _move(moves: Sequence[tuple[int, int, int]]) -> None:
    for target, source, size in moves:
        ctypes.memmove(target, source, size)

"""Ring of pinned blocks, through which tensors of an accelerator reach host memory, and the other way.

A copy between an accelerator and pageable memory runs at a fraction of the link's speed and blocks the host. Pinned
memory of a checkpoint's size is no alternative, because torch rounds it up to a power of two and keeps it. A few pinned
blocks suffice: while the CPU empties one, the accelerator fills the others.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, final

import torch

from accel_ckpt.format.tensors import byte_view, host_copy
from accel_state.device.huge_pages import new_tensor
from accel_state.device.pinned import pinned_bytes, uses_pinned_memory

_BLOCK = 32 * 2**20
_COUNT = 4
Wait = Callable[[], object]


@final
class PinnedRing:
    """``count`` pinned blocks of ``block`` bytes, allocated at first use; for one thread at a time.

    Copies are issued on the current stream of the tensor's device, so they follow the computations that were issued
    there before, whichever device is current. torch caches pinned memory, so a ring for each save or load is cheap.
    """

    def __init__(self, *, block: int = _BLOCK, count: int = _COUNT) -> None:
        self._size, self._count = block, count
        self._blocks: deque[tuple[torch.Tensor, Wait]] = deque()

    def to_host(self, tensors: Sequence[torch.Tensor]) -> Iterator[memoryview]:
        """Yields the bytes of ``tensors``, row-major and one after the other; each view is valid until the next one.

        Copies of the bytes after a view run while the caller works on the view.
        """
        pieces = _pieces(tensors, self._size)
        issued: deque[tuple[torch.Tensor, int, Wait]] = deque()
        while True:
            while len(issued) < self._count and (piece := next(pieces, None)) is not None:
                block = self._take()
                block[: piece.numel()].copy_(piece, non_blocking=True)
                issued.append((block, piece.numel(), end_of_stream(piece.device)))
            if not issued:
                return
            block, size, wait = issued.popleft()
            wait()
            yield byte_view(block)[:size]
            self._blocks.append((block, _nothing))

    def to_device(self, source: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Returns a copy on ``device`` of a contiguous CPU tensor, which may change as soon as the call returns."""
        target = torch.empty(source.shape, dtype=source.dtype, device=device)
        content, goal = source.reshape(-1).view(torch.uint8), target.view(-1).view(torch.uint8)
        for begin in range(0, content.numel(), self._size):
            piece, block = content[begin : begin + self._size], self._take()
            block[: piece.numel()].copy_(piece)
            goal[begin : begin + self._size].copy_(block[: piece.numel()], non_blocking=True)
            self._blocks.append((block, end_of_stream(device)))
        return target

    def _take(self) -> torch.Tensor:
        """Takes the block that was used the longest time ago, once its copy is done."""
        if not self._blocks:
            self._blocks += [(pinned_bytes(self._size), _nothing) for _ in range(self._count)]
        block, wait = self._blocks.popleft()
        wait()
        return block


def host_pieces(tensors: Sequence[torch.Tensor]) -> Iterator[memoryview]:
    """Yields the bytes of ``tensors`` in host memory that the caller may keep; copies no contiguous CPU tensor."""
    ring = PinnedRing()
    waiting = deque(tensors)
    while waiting:
        if not uses_pinned_memory(waiting[0].device):
            yield byte_view(host_copy(waiting.popleft()))
            continue
        together = []
        while waiting and uses_pinned_memory(waiting[0].device):
            together.append(waiting.popleft())
        for view in ring.to_host(together):
            kept = byte_view(new_tensor((len(view),), torch.uint8))
            kept[:] = view
            yield kept


def _pieces(tensors: Sequence[torch.Tensor], size: int) -> Iterator[torch.Tensor]:
    """Yields the bytes of each tensor as flat uint8 tensors of at most ``size`` bytes, on the tensor's device."""
    for tensor in tensors:
        content = flat_bytes(tensor)
        for begin in range(0, content.numel(), size):
            yield content[begin : begin + size]


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the bytes of a tensor, row-major, as a flat uint8 tensor on its device."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def end_of_stream(device: torch.device) -> Wait:
    """Returns a function that waits for all that was issued on the current stream of ``device`` until now."""
    if device.type == "cpu":
        return _nothing
    event: Any = torch.Event(device)
    event.record(torch.accelerator.current_stream(device))
    wait: Wait = event.synchronize
    return wait


def _nothing() -> None:
    """Waits for nothing: the copy is done."""

"""Prefetch: copies of batches to the device of the step, started while the previous step computes."""

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol, final

import torch

from accel_state.pytree.operations import map_leaves, send_to_device

_LARGE = 2**20
"""Bytes of a batch from which on a thread pins it: below, handing it over takes as long as pinning."""


class Placed(Protocol):
    """A batch whose copy to the device has been started."""

    def take(self) -> Any:
        """Returns the batch, ready for the device's current stream. Called once, by the thread that computes."""


class Placer(Protocol):
    """Starts copies of batches to the device. The loader starts the next batch before it yields the current one.

    A backend whose device is fed in another way (XLA queues full batches per core) provides its own placer.
    """

    def start(self, batch: Any) -> Placed:
        """Starts the copy of ``batch``; does not wait for it if the device copies asynchronously."""


def placer_for(
    device: torch.device | None, *, non_blocking: bool = False, even_batches: bool = True, reused: bool = True
) -> Placer:
    """Returns the placer for ``device``; ``None`` leaves batches on their device.

    Devices with streams get copies from pinned memory on a side stream; XLA devices get a shard of every batch each,
    with ``even_batches`` always of one shape. For other devices tensors are moved synchronously, with ``non_blocking``
    passed on. A batch that is already on the device is returned as the same object. ``reused``: the dataset may write
    the next batch into the memory of this one, so that a batch has to be pinned before the next is read.
    """
    if device is None:
        return AsIs()
    if device.type == "xla":
        from accel_data.device.prefetch_xla import XLADevices

        return XLADevices(device, fill=even_batches)
    if has_streams(device):
        return SideStream(device, reused=reused)
    return Direct(device, non_blocking=non_blocking)


def has_streams(device: torch.device) -> bool:
    """Whether copies to ``device`` can overlap its computation: true for torch's accelerator, except MPS.

    MPS shares its memory with the CPU and exposes a single stream, so there is nothing to overlap.
    """
    accelerator = torch.accelerator.current_accelerator()
    return accelerator is not None and accelerator.type == device.type and device.type not in ("cpu", "mps")


@final
class AsIs:
    """Leaves batches on their device: the user moves them, or there is only one device."""

    def start(self, batch: Any) -> Placed:
        """Wraps the batch unchanged."""
        return _Arrived(batch)


@final
class Direct:
    """Moves a batch in ``start``, on the current stream: for devices without streams, and the CPU."""

    def __init__(self, device: torch.device, *, non_blocking: bool = False) -> None:
        self.device, self.non_blocking = device, non_blocking

    def start(self, batch: Any) -> Placed:
        """Moves the tensors that are on another device; a batch that is already there stays the same object."""
        return _Arrived(send_to_device(batch, self.device, self.non_blocking))


@final
class SideStream:
    """Copies a batch from pinned memory on a side stream, so that the copy overlaps the previous step.

    Why this is correct:

    - The copies are allocated while the side stream is current, so the caching allocator assigns their memory to it.
      Memory that it reuses was freed by work that the side stream has waited for, hence the side stream need not wait
      for the step; such a wait would serialise the copy and the step.
    - The step runs on another stream and may read a batch only after its copies: ``take`` makes the current stream wait
      for an event recorded after them. The host does not wait.
    - When the user drops the batch, its memory could be reused by the side stream's next copy although kernels queued
      on the current stream may still read it: ``record_stream`` delays the reuse until those kernels have run.
    - Pinning copies the batch on the host, 15 ms for 150 MB. A thread does that for large batches that the loader has
      not pinned, and queues their copies, unless their memory is ``reused``; ``take`` waits for the thread.
    - The source is pinned by torch, whose host allocator also delays reuse until the copy has run; the batch still
      keeps a reference to the source until ``take``, for sources that other libraries have pinned.
    """

    def __init__(self, device: torch.device, *, reused: bool = True) -> None:
        self.device, self.reused = device, reused
        self._stream: torch.Stream | None = None
        self._thread: ThreadPoolExecutor | None = None

    def start(self, batch: Any) -> Placed:
        """Queues the copies of ``batch``, or has a thread pin it and queue them; waits for no device."""
        # Created on first use, because a loader may be built, pickled or forked before the device is initialised.
        stream = self._stream = self._stream or torch.Stream(self.device)
        if self.reused or _unpinned(batch) < _LARGE:
            return self._queued(batch, stream)
        thread = self._thread = self._thread or ThreadPoolExecutor(1, "accel-pin-memory")
        return _Pinning(thread.submit(self._queued, batch, stream))

    def _queued(self, batch: Any, stream: torch.Stream) -> Placed:
        """Pins the batch, and queues its copies on ``stream``, which is current in this thread alone."""
        copies: list[torch.Tensor] = []

        def copy(leaf: Any) -> Any:
            if not _is_plain(leaf) or leaf.device.type != "cpu":
                return leaf
            source = leaf if leaf.is_pinned() else leaf.pin_memory()
            sources.append(source)
            copies.append(source.to(self.device, non_blocking=True))
            return copies[-1]

        sources: list[torch.Tensor] = []
        with stream:
            copied = map_leaves(copy, batch, is_leaf=_moves_itself)
            event = stream.record_event()
        if not copies:
            return _Arrived(send_to_device(batch, self.device))
        return _InFlight(copied, copies, (sources, event, self.device))

    def __getstate__(self) -> dict[str, object]:
        return {**vars(self), "_stream": None, "_thread": None}


@final
class _Arrived:
    def __init__(self, batch: Any) -> None:
        self._batch = batch

    def take(self) -> Any:
        return self._batch


@final
class _Pinning:
    """A batch that a thread pins."""

    def __init__(self, queued: Future[Placed]) -> None:
        self._queued = queued

    def take(self) -> Any:
        return self._queued.result().take()


@final
class _InFlight:
    """A batch whose copies are queued on the side stream."""

    def __init__(
        self, batch: Any, copies: list[torch.Tensor], transfer: tuple[list[torch.Tensor], torch.Event, torch.device]
    ) -> None:
        self._batch, self._copies, self._transfer = batch, copies, transfer

    def take(self) -> Any:
        sources, event, device = self._transfer
        current = torch.accelerator.current_stream(device)
        current.wait_event(event)
        for copy in self._copies:
            copy.record_stream(current)
        sources.clear()
        # Other leaves (sparse, nested, subclasses, objects with .to) move here, on the current stream, because not all
        # of them support record_stream.
        return send_to_device(self._batch, device)


def _is_plain(leaf: Any) -> bool:
    return type(leaf) is torch.Tensor and leaf.layout == torch.strided and not leaf.is_nested


def _unpinned(batch: Any) -> int:
    """Bytes of the host tensors of a batch that are not pinned, without those in objects that move themselves."""
    sizes: list[int] = []

    def count(leaf: Any) -> Any:
        if _is_plain(leaf) and leaf.device.type == "cpu" and not leaf.is_pinned():
            sizes.append(leaf.nbytes)
        return leaf

    map_leaves(count, batch, is_leaf=_moves_itself)
    return sum(sizes)


def _moves_itself(leaf: Any) -> bool:
    # Mappings with a ``to`` (tokenizer outputs) are traversed: their tensors are plain and their copies can overlap.
    return isinstance(leaf, torch.Tensor) or (callable(getattr(leaf, "to", None)) and not isinstance(leaf, Mapping))

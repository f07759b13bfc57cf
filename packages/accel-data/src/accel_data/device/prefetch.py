"""Copies of batches to the device of the step, started while the step before it still computes."""

from collections.abc import Mapping
from typing import Any, Protocol, final

import torch

from accel_state.pytree.operations import map_leaves, send_to_device


class Placed(Protocol):
    """A batch on its way to the device."""

    def take(self) -> Any:
        """The batch, safe to use on the current stream of the device. Called once, by the thread that computes."""


class Placer(Protocol):
    """Starts moving batches. The loader starts the next one before it hands out the current one.

    A backend whose device is fed in another way (XLA queues whole batches per core) brings its own.
    """

    def start(self, batch: Any) -> Placed:
        """Begins the move of ``batch`` and returns without waiting for it where the device allows."""


def placer_for(device: torch.device | None, *, non_blocking: bool = False, even_batches: bool = True) -> Placer:
    """The placer that suits ``device``; ``None`` leaves batches where they are.

    A device with streams gets pinned copies on a stream of their own; XLA devices get parts of every batch, all of one
    shape with ``even_batches``. Elsewhere tensors are moved at once, with ``non_blocking`` passed on. A batch whose
    leaves all are in place already is returned as the same object.
    """
    if device is None:
        return AsIs()
    if device.type == "xla":
        from accel_data.device.prefetch_xla import XLADevices

        return XLADevices(device, fill=even_batches)
    if has_streams(device):
        return SideStream(device)
    return Direct(device, non_blocking=non_blocking)


def has_streams(device: torch.device) -> bool:
    """Whether copies to ``device`` can run beside its computation: this build's accelerator, except Apple's.

    MPS shares its memory with the CPU and exposes one stream only, so there is nothing to overlap.
    """
    accelerator = torch.accelerator.current_accelerator()
    return accelerator is not None and accelerator.type == device.type and device.type not in ("cpu", "mps")


@final
class AsIs:
    """Leaves batches where they are: the user places them, or there is one device only."""

    def start(self, batch: Any) -> Placed:
        """The batch itself."""
        return _Arrived(batch)


@final
class Direct:
    """Moves a batch when it is started, on the stream in use: devices without streams, and the CPU."""

    def __init__(self, device: torch.device, *, non_blocking: bool = False) -> None:
        self.device, self.non_blocking = device, non_blocking

    def start(self, batch: Any) -> Placed:
        """Moves what has to move; a batch that is in place is handed on as the same object."""
        return _Arrived(send_to_device(batch, self.device, self.non_blocking))


@final
class SideStream:
    """Copies a batch from pinned memory on a stream of its own, so that the copy runs under the previous step.

    Why this is correct:

    - The copies are allocated while the side stream is current, so the caching allocator books their memory on it. What
      it hands out there was freed by work this stream has seen, hence the side stream need not wait for the step: that
      wait would serialise what is meant to overlap.
    - The step runs on another stream and may read a batch only after its copies: ``take`` makes the current stream wait
      for an event recorded behind them. The host waits for nothing.
    - When the user drops the batch its memory would be free for the side stream's next copy although kernels queued on
      the current stream may still read it: ``record_stream`` delays the reuse until those have run.
    - The source is pinned by torch, whose host allocator also delays reuse until the copy has run; the batch keeps a
      reference to it until it is taken nevertheless, for sources pinned by someone else.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream: torch.Stream | None = None

    def start(self, batch: Any) -> Placed:
        """Queues the copies of ``batch``; only pinning, where the loader has not done so, costs host time."""
        # Made on first use: a loader may be built, pickled or forked before the device may be touched.
        stream = self._stream = self._stream or torch.Stream(self.device)
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
        return {"device": self.device, "_stream": None}


@final
class _Arrived:
    def __init__(self, batch: Any) -> None:
        self._batch = batch

    def take(self) -> Any:
        return self._batch


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
        # Leaves of other kinds (sparse, nested, subclasses, objects with .to) move here, on the current stream: not all
        # of them can be recorded on a stream.
        return send_to_device(self._batch, device)


def _is_plain(leaf: Any) -> bool:
    return type(leaf) is torch.Tensor and leaf.layout == torch.strided and not leaf.is_nested


def _moves_itself(leaf: Any) -> bool:
    # Mappings that can move (tokenizer outputs) are entered: their tensors are plain and may overlap.
    return isinstance(leaf, torch.Tensor) or (callable(getattr(leaf, "to", None)) and not isinstance(leaf, Mapping))

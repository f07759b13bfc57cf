"""Loss on its way to the host, which a meter reads one step later instead of waiting for the device."""

from dataclasses import dataclass
from typing import Any, final

import torch

Place = tuple[int, int, int]
"""Epoch of a step's samples, and their positions in it: first, and one past the last."""


@final
@dataclass(frozen=True, slots=True)
class LossFacts:
    """Facts of a step that a report of its loss names.

    Attributes:
        step: optimizer steps of the run.
        place: samples of the step; None if unknown.
        squares: squared norms of this rank's gradients, on their device, if the loss is looked at later; None: the
            gradients themselves are still there.
    """

    step: int
    place: Place | None
    squares: torch.Tensor | None = None


@final
class LateLoss:
    """Copy of a loss to pinned host memory, and an event after it.

    ``float`` waits for the event alone, which is over as soon as the step is, and not for the next step.
    """

    def __init__(self, loss: torch.Tensor, facts: LossFacts) -> None:
        self.facts = facts
        on_host = loss.device.type == "cpu"
        self._host = torch.empty((), dtype=loss.dtype, pin_memory=not on_host)
        self._host.copy_(loss.reshape(()), non_blocking=True)
        self._ready: Any = None if on_host else torch.accelerator.current_stream(loss.device).record_event()

    def read(self) -> float:
        """Returns the loss."""
        if self._ready is not None:
            self._ready.synchronize()
        return float(self._host)

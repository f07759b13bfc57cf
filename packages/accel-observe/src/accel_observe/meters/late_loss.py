"""Loss on its way to the host, which a meter reads one step later instead of waiting for the device."""

from dataclasses import dataclass
from typing import final

import torch

from accel_state.device.pinned import HostCopy

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
    """Loss that is being copied to the host; ``read`` waits for the end of its step, and not for the next step."""

    def __init__(self, loss: torch.Tensor, facts: LossFacts) -> None:
        self.facts = facts
        self._copy = HostCopy(loss.reshape(()))

    def read(self) -> float:
        """Returns the loss."""
        return float(self._copy.read())

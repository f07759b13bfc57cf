"""Gradients of models on XLA devices."""

from collections.abc import Sequence
from typing import cast, final

import torch
from torch import nn

from accel_backends.roles.gradients import ReplicatedGradients
from accel_backends.xla.recording import on_host, run_recorded


@final
class XLAGradients(ReplicatedGradients):
    """Gradients of the global batch, which the compiler reduces: there is no average over ranks."""

    def unreduced(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """Returns gradients as full tensors in host memory."""
        return cast("dict[str, torch.Tensor]", on_host(super().unreduced(model)))

    def finite(self, gradients: Sequence[torch.Tensor]) -> list[bool]:
        """Whether all elements of each gradient are finite; runs the computations recorded so far."""
        run_recorded()
        return super().finite(gradients)

"""Gradients of an accumulation window that was open when a checkpoint was taken."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from accel_backends.names import named_parameters

GRADIENTS = "gradients"
"""Name of this rank's part of a checkpoint."""


def collect(models: Sequence[nn.Module]) -> dict[str, Any]:
    """This rank's gradients by model position and parameter name."""
    return {
        str(position): {
            name: parameter.grad for name, parameter in named_parameters(model).items() if parameter.grad is not None
        }
        for position, model in enumerate(models)
    }


def restore(
    models: Sequence[nn.Module],
    saved: Sequence[Mapping[str, Any] | None],
    *,
    rank: int,
    world_size: int,
) -> None:
    """Puts the gradients back so that the window goes on where it was.

    ``saved`` holds each saving rank's gradients. On as many ranks every one takes its own. On another number, rank 0
    takes the sum of all, scaled so that the backend's averaging over the new ranks gives what averaging over the old
    ones would have given; the others start from nothing. The window's result is the same either way.
    """
    same = len(saved) == world_size
    chosen = [saved[rank]] if same else list(saved) if rank == 0 else []
    factor = 1.0 if same else world_size / len(saved)
    for position, model in enumerate(models):
        for name, parameter in named_parameters(model).items():
            parts = [part[str(position)][name] for part in chosen if part and name in part.get(str(position), {})]
            if not parts:
                parameter.grad = None
                continue
            total = parts[0] if len(parts) == 1 else torch.stack(list(parts)).sum(0)
            parameter.grad = (total * factor if factor != 1.0 else total).to(parameter.device, parameter.dtype)

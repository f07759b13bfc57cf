"""Gradients of an accumulation window that was open when a checkpoint was taken."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from accel_backends import Backend

GRADIENTS = "gradients"
"""Name of this rank's part of a checkpoint."""


def collect(backend: "Backend", models: Sequence[nn.Module]) -> dict[str, Any]:
    """This rank's share of the gradients by model position and parameter name."""
    return {str(position): backend.held_gradients(model) for position, model in enumerate(models)}


def restore(
    backend: "Backend",
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
        shares = [part.get(str(position), {}) for part in chosen if part]
        names = dict.fromkeys(name for share in shares for name in share)
        backend.hold_gradients(model, {name: _sum(shares, name, factor) for name in names})


def _sum(shares: Sequence[Mapping[str, torch.Tensor]], name: str, factor: float) -> torch.Tensor:
    parts = [share[name] for share in shares if name in share]
    total = parts[0] if len(parts) == 1 else torch.stack(parts).sum(0)
    return total * factor if factor != 1.0 else total

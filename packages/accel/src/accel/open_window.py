"""Gradients of an accumulation window that was open when a checkpoint was taken."""

from collections.abc import Callable, Mapping, Sequence
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
    read: Callable[[int], Mapping[str, Any] | None],
    *,
    saved_ranks: int,
    rank: int,
    world_size: int,
) -> None:
    """Puts the gradients back so that the window goes on where it was.

    ``read`` gives what one of the ``saved_ranks`` saved. On as many ranks every one takes its own. On another number,
    rank 0 takes the sum of all, scaled so that the backend's averaging over the new ranks gives what averaging over
    the old ones would have given; the others start from nothing. The window's result is the same either way.
    """
    same = saved_ranks == world_size
    sources = [rank] if same else range(saved_ranks) if rank == 0 else []
    totals: dict[str, dict[str, torch.Tensor]] = {}
    for source in sources:
        for position, share in (read(source) or {}).items():
            total = totals.setdefault(position, {})
            for name, gradient in share.items():
                total[name] = total[name] + gradient if name in total else gradient
    factor = 1.0 if same else world_size / saved_ranks
    for number, model in enumerate(models):
        held = totals.get(str(number), {})
        backend.hold_gradients(model, held if same else {name: gradient * factor for name, gradient in held.items()})

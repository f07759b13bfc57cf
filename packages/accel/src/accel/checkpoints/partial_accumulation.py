"""Gradients of an accumulation window when a checkpoint is taken: kept if it is open, refused if it is full."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from accel.checkpoints.load_report import few
from accel_state.errors import CheckpointError

if TYPE_CHECKING:
    from accel_backends import Backend

GRADIENTS = "gradients"
"""Name of this rank's part of a checkpoint."""


def collect(backend: "Backend", models: Sequence[nn.Module]) -> dict[str, Any]:
    """This rank's share of the gradients by model position and parameter name."""
    return {str(position): backend.unreduced_gradients(model) for position, model in enumerate(models)}


def refuse(held: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
    """Raises if there are gradients, as ``collect`` gives them, of a full window that no optimizer has stepped with.

    A run that is resumed from such a checkpoint would go on with the next batch, without that step.

    Raises:
        CheckpointError: names some of their parameters.
    """
    names = [name for gradients in held.values() for name in gradients]
    if names:
        raise CheckpointError(
            f"save_state was called between backward and optimizer.step(): the gradients of {few(names, 3)} are due "
            "and would be lost. Call it after optimizer.step(), or drop them with optimizer.zero_grad() before"
        )


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
        backend.set_unreduced_gradients(
            model, held if same else {name: gradient * factor for name, gradient in held.items()}
        )

"""Unreduced gradients in a checkpoint: saved if the accumulation window is open, refused if it is full."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from accel_backends.ops.fqn import few
from accel_state.errors import CheckpointError

if TYPE_CHECKING:
    from accel_backends import Backend

GRADIENTS = "gradients"
"""Name of this rank's gradients in a checkpoint."""


def collect(backend: "Backend", models: Sequence[nn.Module]) -> dict[str, Any]:
    """This rank's unreduced gradients, by model position and parameter name."""
    return {str(position): backend.gradients.unreduced(model) for position, model in enumerate(models)}


def refuse(held: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
    """Refuses gradients, as ``collect`` returns them, of a full window with which no optimizer has stepped.

    A run resumed from such a checkpoint would continue with the next batch and lose that step.

    Raises:
        CheckpointError: names some of their parameters.
    """
    names = [name for gradients in held.values() for name in gradients]
    if names:
        raise CheckpointError(
            f"save_state was called between backward and optimizer.step(): the gradients of {few(names, 3)} are due "
            "and would be lost. Call it after optimizer.step(), or drop them with optimizer.zero_grad() before"
        )


def drop(backend: "Backend", models: Sequence[nn.Module]) -> None:
    """Drops the gradients that this run has accumulated itself."""
    for model in models:
        backend.gradients.drop(model)


def read(
    of_rank: Callable[[int], Mapping[str, Any] | None], *, saved_ranks: int, rank: int, world_size: int
) -> dict[str, dict[str, torch.Tensor]]:
    """Returns the unreduced gradients that this rank continues with, by model position and parameter name.

    ``of_rank`` returns the gradients that one of the ``saved_ranks`` saved. If the number of ranks is the same, each
    rank takes its own. Otherwise rank 0 takes the sum of all, scaled so that averaging over the new ranks equals
    averaging over the old ones, and the other ranks start from zero. The window's result is the same either way.
    """
    same = saved_ranks == world_size
    totals: dict[str, dict[str, torch.Tensor]] = {}
    for source in [rank] if same else range(saved_ranks) if rank == 0 else []:
        for position, share in (of_rank(source) or {}).items():
            total = totals.setdefault(position, {})
            for name, gradient in share.items():
                total[name] = total[name] + gradient if name in total else gradient
    if same:
        return totals
    factor = world_size / saved_ranks
    return {position: {name: one * factor for name, one in held.items()} for position, held in totals.items()}


def restore(backend: "Backend", models: Sequence[nn.Module], held: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
    """Sets the unreduced gradients that ``read`` returned, so that the accumulation window continues where it was."""
    for number, model in enumerate(models):
        backend.gradients.set_unreduced(model, dict(held.get(str(number), {})))

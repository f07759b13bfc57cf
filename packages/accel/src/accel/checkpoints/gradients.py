"""Gradients in a checkpoint: those of open windows with the weights of their losses, and those of later steps."""

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from accel.checkpoints.train_state import SideState
from accel_backends.ops.dtensor import local_of
from accel_backends.ops.fqn import named_parameters
from accel_backends.roles.unreduced_gradients import GRADIENTS, collect

if TYPE_CHECKING:
    from accel.loop.accumulator import StepClock
    from accel.optimizer import PreparedOptimizer
    from accel.prepared import PreparedObjects
    from accel_backends import Backend

WEIGHTS = "window_weights"
"""Name of this rank's weights in open windows."""
ZEROS = "zero_gradients"
"""Name of the parameters of this rank whose gradients are zero."""


def uncleared_optimizers(prepared: "PreparedObjects", clock: "StepClock") -> SideState:
    """State of optimizers that have stepped and not cleared their gradients since: their numbers."""

    def save() -> list[int]:
        return [number for number, one in enumerate(prepared.optimizers) if one.uncleared]

    def load(numbers: Collection[int] | None) -> None:
        clock.uncleared = {one for number, one in enumerate(prepared.optimizers) if number in (numbers or ())}

    return SideState(save, load)


def gradients_of_later_steps(prepared: "PreparedObjects") -> dict[str, dict[str, torch.Tensor]]:
    """Returns this rank's gradients, or shards of them, that the next step of their optimizer uses.

    They are keyed by the model's position and the FQN: what ``zero_grad(set_to_none=False)`` has left, and what losses
    of other models have added after an optimizer cleared. An optimizer that has stepped and not cleared uses none.
    """
    return _gradients(prepared, [one for one in prepared.optimizers if not one.uncleared])


def has_gradients_of_later_steps(backend: "Backend", prepared: "PreparedObjects") -> bool:
    """Whether a gradient that the next step of its optimizer uses is not zero on this rank; waits for devices."""
    later = gradients_of_later_steps(prepared)
    return any(map(backend.gradients.outside_grad, prepared.models)) or any(
        bool(local_of(one).any()) for of_model in later.values() for one in of_model.values()
    )


def collected_gradients(
    backend: "Backend", prepared: "PreparedObjects", clock: "StepClock", *, values: bool
) -> dict[str, Any]:
    """Returns what a checkpoint keeps of this rank's gradients; ``values``: some of a later step are not zero.

    Collective if a window is open or ``values`` is set: every rank of the group must call this.
    """
    values = values or clock.open
    zeros = _gradients(prepared, [one for one in prepared.optimizers if one.uncleared and one.keeps_zeros])
    if not values:
        for position, of_model in gradients_of_later_steps(prepared).items():
            zeros.setdefault(position, {}).update(of_model)
    found: dict[str, Any] = {ZEROS: {position: sorted(one) for position, one in zeros.items()}} if zeros else {}
    if values:
        found[GRADIENTS] = held = collect(backend, prepared.models)
        for position, of_model in _owned(prepared, [one for one in prepared.optimizers if one.uncleared]).items():
            for name in of_model:
                held[position].pop(name, None)
        if weights := clock.weights():
            found[WEIGHTS] = weights
    return found


def set_zeros(prepared: "PreparedObjects", names: Mapping[str, Collection[str]]) -> None:
    """Sets gradients to zero, of parameters by the model's position and the FQN, where an optimizer has them."""
    for position, of_model in _owned(prepared, prepared.optimizers).items() if names else ():
        for name in of_model.keys() & set(names.get(position, ())):
            of_model[name].grad = torch.zeros_like(of_model[name])


def _owned(
    prepared: "PreparedObjects", optimizers: "Sequence[PreparedOptimizer]"
) -> dict[str, dict[str, torch.Tensor]]:
    """Parameters of optimizers, by the model's position and the FQN."""
    ids = {id(p) for one in optimizers for group in one.param_groups for p in group["params"]}
    return {
        str(position): {name: one for name, one in named_parameters(model).items() if id(one) in ids}
        for position, model in enumerate(prepared.models if ids else ())
    }


def _gradients(
    prepared: "PreparedObjects", optimizers: "Sequence[PreparedOptimizer]"
) -> dict[str, dict[str, torch.Tensor]]:
    """Gradients of the parameters of optimizers, by the model's position and the FQN."""
    if all(p.grad is None for one in optimizers for group in one.param_groups for p in group["params"]):
        return {}
    return {
        position: found
        for position, owned in _owned(prepared, optimizers).items()
        if (found := {name: one.grad for name, one in owned.items() if one.grad is not None})
    }

"""Gradients in a checkpoint: those of open windows with the weights of their losses, and those of later steps."""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from accel.checkpoints.train_state import SideState
from accel_backends.ops.dtensor import local_of
from accel_backends.ops.fqn import named_parameters
from accel_backends.roles.unreduced_gradients import GRADIENTS, collect

if TYPE_CHECKING:
    from accel.checkpoints.requests import SaveRequest
    from accel.loop.accumulator import StepClock
    from accel.optimizer import PreparedOptimizer
    from accel.prepared import PreparedObjects
    from accel_backends import Backend

WEIGHTS = "window_weights"
"""Name of this rank's weights in open windows."""
ZEROS = "zero_gradients"
"""Name of the parameters that have a gradient, if only one of zero, on any rank."""


def uncleared_optimizers(prepared: "PreparedObjects", clock: "StepClock") -> SideState:
    """State of optimizers that have stepped and not cleared their gradients since: their numbers."""

    def save() -> list[int]:
        return [number for number, one in enumerate(prepared.optimizers) if one.uncleared]

    def load(numbers: object) -> None:
        listed = numbers if isinstance(numbers, list) else ()  # an older checkpoint has none
        clock.uncleared = {one for number, one in enumerate(prepared.optimizers) if number in listed}

    return SideState(save, load)


def has_gradients_of_later_steps(backend: "Backend", prepared: "PreparedObjects") -> bool:
    """Whether the next step of an optimizer uses gradients that this rank has, zero ones not counted.

    Losses of other models add such gradients after the optimizer's ``zero_grad``. An optimizer that has stepped and not
    cleared has none, because its next ``zero_grad`` clears them. Gradients after ``zero_grad(set_to_none=False)`` are
    compared with zero, which waits for the device.
    """
    if any(map(backend.gradients.outside_grad, prepared.models)):
        return True
    cleared = [one for one in prepared.optimizers if not one.uncleared]
    if _gradients(prepared, [one for one in cleared if not one.keeps_zeros]):
        return True
    kept = _gradients(prepared, [one for one in cleared if one.keeps_zeros])
    return any(bool(local_of(one).any()) for of_model in kept.values() for one in of_model.values())


def zero_gradients(prepared: "PreparedObjects") -> dict[str, list[str]]:
    """Names of this rank's parameters that have a gradient and whose optimizer clears it to zero, by model position."""
    kept = _gradients(prepared, [one for one in prepared.optimizers if one.keeps_zeros])
    return {position: sorted(of_model) for position, of_model in kept.items()}


def collected_gradients(
    backend: "Backend", prepared: "PreparedObjects", clock: "StepClock", request: "SaveRequest"
) -> dict[str, Any]:
    """Returns what a checkpoint keeps of this rank's gradients.

    Collective if a window is open or the request has gradients: every rank of the group must call this.
    """
    found: dict[str, Any] = {ZEROS: request.zeros} if request.zeros else {}
    if not clock.open and not request.gradients:
        return found
    found[GRADIENTS] = held = collect(backend, prepared.models)
    for position, of_model in _owned(prepared, [one for one in prepared.optimizers if one.uncleared]).items():
        for name in of_model:
            held[position].pop(name, None)
    if weights := clock.weights():
        share = data_shards(backend) / backend.session.world_size
        found[WEIGHTS] = {text: weight * share for text, weight in weights.items()}
    return found


def data_shards(backend: "Backend") -> int:
    """Number of ranks that weigh different tokens. The weights that all ranks save add up to those of these."""
    shared = dict(backend.layout.shared_degrees)
    if backend.layout.sequence_group is not None:  # loaders shard sequences, and ranks weigh their own tokens
        del shared["sp"]
    return backend.session.world_size // math.prod(shared.values())


def set_zeros(prepared: "PreparedObjects", names: Mapping[str, Collection[str]]) -> None:
    """Sets gradients that are missing to zero, of parameters of optimizers, by the model's position and the FQN."""
    for position, of_model in _owned(prepared, prepared.optimizers).items() if names else ():
        for name in of_model.keys() & set(names.get(position, ())):
            if of_model[name].grad is None:
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

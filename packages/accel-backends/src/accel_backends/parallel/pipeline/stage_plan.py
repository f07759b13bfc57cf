"""Tensor-parallel plan of a pipeline stage: the part of the full model's plan whose modules the stage has."""

from collections.abc import Sequence
from typing import Any

from torch import nn

from accel_backends.parallel.plan import StyleChoice, TensorParallelPlan
from accel_backends.parallel.styles import Colwise, GatherSequence, Rowwise, SequenceSharded, SplitSequence
from accel_backends.parallel.tensor_parallel import plan_for
from accel_state.errors import PrepareError

Places = Sequence[tuple[str, nn.Module, StyleChoice]]
"""Modules of a full model with their names, and the choices of its plan."""


def places_of(model: nn.Module, size: int, plan: Any) -> Places:
    """Modules of a full model that its tensor-parallel plan places on ``size`` ranks.

    Raises:
        PrepareError: the plan does not fit the model, or shards what goes from stage to stage.
    """
    places = plan_for(model, size, plan).modules(model)
    for name, _, choice in places:
        style = choice.style
        if isinstance(style, GatherSequence | SequenceSharded | SplitSequence) or (
            isinstance(style, Rowwise) and style.scatter_sequence
        ):
            raise PrepareError(
                f"the tensor-parallel plan shards the sequence at {name}, and pipeline stages send full sequences; "
                'nearest: a plan without sequence parallelism, as plan="derive"'
            )
        if isinstance(style, Colwise) and style.output == "dtensor":
            raise PrepareError(
                f"the tensor-parallel plan leaves the output of {name} sharded (colwise_loss_parallel), and a pipeline "
                'computes the loss from full logits; nearest: "colwise_gather_output"'
            )
    return places


def plan_of_stage(places: Places, model: nn.Module) -> TensorParallelPlan:
    """The plan of the modules that a model still has after ``drop_other_stages``, each under its full name."""
    here = dict(model.named_modules(remove_duplicate=False))
    return TensorParallelPlan(
        tuple(
            StyleChoice(name, choice.style, choice.reason)
            for name, module, choice in places
            if here.get(name) is module
        )
    )

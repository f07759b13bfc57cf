"""State dicts of Transformers models as those of megatron-core's models, and back; exact in both directions."""

from collections.abc import Mapping
from itertools import product
from typing import Any

import torch

from accel_megatron.conversion.kinds import architecture_of
from accel_megatron.conversion.rules import stacked, unstacked


def to_megatron(
    config: Any,
    state: Mapping[str, torch.Tensor],
    *,
    place: tuple[int, ...] = (0, 0),
    degrees: tuple[int, ...] = (1, 1),
) -> dict[str, torch.Tensor]:
    """Returns the state dict of megatron-core's model on one rank.

    Args:
        config: configuration of the Transformers model (Llama, Mixtral, GPT-2, BERT or T5).
        state: its full state dict.
        place: tensor-parallel rank, pipeline stage, and with experts the expert-parallel rank and the rank among those
            that share an expert (default 0).
        degrees: tensor-parallel size, number of stages, the expert-parallel size, and the number of ranks that share an
            expert (default 1).

    Raises:
        PrepareError: a model that megatron-core does not compute, or degrees that do not divide it.
    """
    architecture = architecture_of(config, state)
    architecture.check_degrees(*degrees)
    tensor_rank, stage, expert_rank, part = _filled(place, 0)
    tensor_size, pipeline, expert_size, parts = _filled(degrees, 1)
    slices = unstacked(state, architecture.stacks)
    return {
        name: rule.shard(
            rule.join([slices[one] for one in rule.names]),
            *((part, parts) if rule.of_expert else (tensor_rank, tensor_size)),
        )
        for name, rule in architecture.rules(stage, pipeline, expert_rank, expert_size)
    }


def from_megatron(
    config: Any, states: Mapping[tuple[int, ...], Mapping[str, torch.Tensor]], degrees: tuple[int, ...] = (1, 1)
) -> dict[str, torch.Tensor]:
    """Returns the full state dict of a Transformers model; ``states``: those of all ranks, by their ``place``.

    Tied tensors are under their first name only.

    Raises:
        PrepareError: a model that megatron-core does not compute, or degrees that do not divide it.
    """
    architecture = architecture_of(config, {name for state in states.values() for name in state})
    architecture.check_degrees(*degrees)
    tensor_size, pipeline, expert_size, parts = _filled(degrees, 1)
    dense: dict[tuple[int, int], Mapping[str, torch.Tensor]] = {}
    experts: dict[tuple[int, int, int], Mapping[str, torch.Tensor]] = {}
    for place, state in states.items():
        tensor_rank, stage, expert_rank, part = _filled(place, 0)
        dense[tensor_rank, stage] = experts[part, stage, expert_rank] = state
    full: dict[str, torch.Tensor] = {}
    for stage, expert_rank in product(range(pipeline), range(expert_size)):
        for name, rule in architecture.owned_rules(stage, pipeline, expert_rank, expert_size):
            shards = (
                [experts[part, stage, expert_rank][name] for part in range(parts)]
                if rule.of_expert
                else [dense[rank, stage][name] for rank in range(tensor_size)]
            )
            full.update(zip(rule.names, rule.split(rule.unshard(shards)), strict=True))
    return stacked(full)


def _filled(numbers: tuple[int, ...], missing: int) -> tuple[int, int, int, int]:
    """Returns a place or degrees with those that are left out."""
    tensor, pipeline, expert, of_each = (*numbers, missing, missing)[:4]
    return tensor, pipeline, expert, of_each

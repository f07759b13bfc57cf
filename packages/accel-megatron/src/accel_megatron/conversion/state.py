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
        place: tensor-parallel rank, pipeline stage, and with experts the expert-parallel rank (default 0).
        degrees: tensor-parallel size, number of stages, and the expert-parallel size (default 1).

    Raises:
        PrepareError: a model that megatron-core does not compute, or degrees that do not divide it.
    """
    architecture = architecture_of(config, state)
    architecture.check_degrees(*degrees)
    tensor_rank, stage, expert_rank = (*place, 0)[:3]
    tensor_size, pipeline, expert_size = (*degrees, 1)[:3]
    slices = unstacked(state, architecture.stacks)
    return {
        name: rule.shard(rule.join([slices[one] for one in rule.names]), tensor_rank, tensor_size)
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
    tensor_size, pipeline, expert_size = (*degrees, 1)[:3]
    full: dict[str, torch.Tensor] = {}
    for stage, expert_rank in product(range(pipeline), range(expert_size)):
        for name, rule in architecture.owned_rules(stage, pipeline, expert_rank, expert_size):
            places = [(rank, stage, expert_rank)[: len(degrees)] for rank in range(tensor_size)]
            shards = [states[place][name] for place in places]
            full.update(zip(rule.names, rule.split(rule.unshard(shards)), strict=True))
    return stacked(full)

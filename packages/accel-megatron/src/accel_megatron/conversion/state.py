"""State dicts of Transformers models as those of megatron-core's models, and back; exact in both directions."""

from collections.abc import Mapping
from typing import Any

import torch

from accel_megatron.conversion.architecture import architecture_of


def to_megatron(
    config: Any,
    state: Mapping[str, torch.Tensor],
    *,
    place: tuple[int, int] = (0, 0),
    degrees: tuple[int, int] = (1, 1),
) -> dict[str, torch.Tensor]:
    """Returns the state dict of megatron-core's model on one rank.

    Args:
        config: configuration of the Transformers model (Llama or GPT-2).
        state: its full state dict.
        place: tensor-parallel rank and pipeline stage.
        degrees: tensor-parallel size and number of stages.

    Raises:
        PrepareError: a model that megatron-core does not compute, or degrees that do not divide it.
    """
    architecture = architecture_of(config)
    architecture.check_degrees(*degrees)
    return {
        name: rule.shard(rule.join([state[one] for one in rule.names]), place[0], degrees[0])
        for name, rule in architecture.rules(place[1], degrees[1])
    }


def from_megatron(
    config: Any, states: Mapping[tuple[int, int], Mapping[str, torch.Tensor]], degrees: tuple[int, int] = (1, 1)
) -> dict[str, torch.Tensor]:
    """Returns the full state dict of a Transformers model; ``states``: those of all ranks, by their ``place``.

    Tied tensors are under their first name only.
    """
    architecture = architecture_of(config)
    full: dict[str, torch.Tensor] = {}
    for stage in range(degrees[1]):
        for name, rule in architecture.owned_rules(stage, degrees[1]):
            shards = [states[rank, stage][name] for rank in range(degrees[0])]
            full.update(zip(rule.names, rule.split(rule.unshard(shards)), strict=True))
    return full

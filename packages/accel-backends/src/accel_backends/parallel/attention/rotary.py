"""Rotary embeddings of shards of sequences, with frequencies that depend on the length of full ones."""

from types import MethodType
from typing import Any

import torch
from torch import nn

from accel_backends.parallel.attention.positions import SequenceSharding


def see_full_lengths(model: nn.Module, sharding: SequenceSharding, rank: int) -> None:
    """Gives the rotary embeddings of a transformers model the length of full sequences, in place.

    Embeddings of the types "dynamic" and "longrope" choose their frequencies by the largest position that they get,
    which differs between the shards. The last position of full sequences is therefore appended, and its output dropped.
    """

    def forward(layer: nn.Module, x: torch.Tensor, position_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        length = position_ids.shape[-1] * sharding.size
        first = sharding.positions(length, rank, device=position_ids.device)[0]
        last = position_ids[..., :1] + (length - 1 - first)
        output = type(layer).forward(layer, x, torch.cat([position_ids, last], dim=-1), *args, **kwargs)
        # Cosines and sines, or one tensor of both.
        return tuple(one[..., :-1, :] for one in output) if isinstance(output, tuple) else output[..., :-1, :]

    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        listed = kinds.values() if isinstance(kinds, dict) else (kinds,)
        if any(isinstance(one, str) and ("dynamic" in one or one == "longrope") for one in listed):
            module.forward = MethodType(forward, module)

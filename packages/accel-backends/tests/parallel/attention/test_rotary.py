"""Rotary embeddings of shards are those of full sequences."""

from copy import deepcopy

import pytest
import torch

from accel_backends.parallel.attention.positions import SequenceSharding
from accel_backends.parallel.attention.rotary import see_full_lengths

LENGTH, ORIGINAL = 24, 20
LONG = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "original_max_position_embeddings": ORIGINAL}


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
@pytest.mark.parametrize("balanced", [True, False])
def test_frequencies_are_those_of_the_length_of_full_sequences(kind, balanced):
    """Which are longer than those of the pretraining, while the shard of one rank is not."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    rope = {"rope_type": kind, "rope_theta": 10000.0, "factor": 2.0, **(LONG if kind == "longrope" else {})}
    config = LlamaConfig(hidden_size=32, num_attention_heads=4, max_position_embeddings=ORIGINAL, rope_parameters=rope)
    expected, x = LlamaRotaryEmbedding(config), torch.zeros(1)
    full = deepcopy(expected)(x, torch.arange(LENGTH)[None])
    for rank in range(2):
        embedding, sharding = deepcopy(expected), SequenceSharding(2, balanced)
        see_full_lengths(embedding, sharding, rank)
        positions = sharding.positions(LENGTH, rank)
        for _ in range(2):
            shard = embedding(x, position_ids=positions[None])
            assert all(torch.equal(one, other[:, positions]) for one, other in zip(shard, full, strict=True))

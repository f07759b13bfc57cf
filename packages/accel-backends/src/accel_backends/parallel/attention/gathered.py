"""Attention over sharded sequences by an all-gather of keys and values.

As in Llama 3 (Grattafiori et al. 2024, arXiv:2407.21783, section 3.3.2): with grouped-query attention keys and values
are small, and each rank's chunk is one call of torch's kernels for ``scaled_dot_product_attention``.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.attention.bias import CausalBias, CausalVariant

from accel_backends.parallel.attention.positions import SequenceSharding


def gathered_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    group: dist.ProcessGroup,
    sharding: SequenceSharding,
    scale: float,
    causal: bool,
) -> torch.Tensor:
    """Softmax attention of this rank's queries to the keys of all ranks; differentiable.

    All tensors are (batch, heads, local tokens, features), sharded over the tokens as ``sharding`` says; queries may
    have a multiple of the heads of keys.

    Collective: every rank of the group must call this.
    """
    rank, length = dist.get_rank(group), query.shape[-2]
    features = key.shape[-1]
    full = gathered_sequences(torch.cat([key, value], dim=-1), group=group, sharding=sharding)
    keys, values = full.split([features, value.shape[-1]], dim=-1)
    grouped = query.shape[1] != key.shape[1]
    if not causal:
        return F.scaled_dot_product_attention(query, keys, values, scale=scale, enable_gqa=grouped)
    chunk = length // len(sharding.chunks(rank))
    outputs = []
    for part, index in zip(query.split(chunk, dim=-2), sharding.chunks(rank), strict=True):
        seen = (index + 1) * chunk
        outputs.append(
            F.scaled_dot_product_attention(
                part,
                keys[..., :seen, :],
                values[..., :seen, :],
                attn_mask=_causal_bias(chunk, seen),
                scale=scale,
                enable_gqa=grouped,
            )
        )
    return torch.cat(outputs, dim=-2)


def gathered_sequences(shard: torch.Tensor, *, group: dist.ProcessGroup, sharding: SequenceSharding) -> torch.Tensor:
    """Full sequences (batch, heads, tokens, features) of the shards that all ranks pass; differentiable.

    The gradient of a shard is the sum of those that all ranks have.

    Collective: every rank of the group must call this.
    """
    shards: torch.Tensor = _GatheredShards.apply(shard, group)  # type: ignore[no-untyped-call]
    return _in_order(shards, sharding)


def _causal_bias(queries: int, keys: int) -> CausalBias:
    """``causal_lower_right``, which torch cannot construct in a dispatch mode (selective checkpointing) or a graph."""
    bias = torch.empty(0).as_subclass(CausalBias)
    CausalBias.__init__(bias, CausalVariant.LOWER_RIGHT, queries, keys)
    return bias


def _in_order(shards: torch.Tensor, sharding: SequenceSharding) -> torch.Tensor:
    """Full sequences (batch, heads, tokens, features) from the shards of all ranks, stacked in order of rank."""
    pieces: dict[int, torch.Tensor] = {}
    for rank, shard in enumerate(shards.unbind(0)):
        chunks = sharding.chunks(rank)
        pieces.update(zip(chunks, shard.chunk(len(chunks), dim=-2), strict=True))
    return torch.cat([pieces[index] for index in sorted(pieces)], dim=-2)


class _GatheredShards(torch.autograd.Function):
    """All-gather along a new first dim; the backward reduce-scatters the gradients."""

    @staticmethod
    def forward(ctx: Any, shard: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        size = dist.get_world_size(group)
        gathered = shard.new_empty(size * shard.shape[0], *shard.shape[1:])
        dist.all_gather_into_tensor(gathered, shard.contiguous(), group=group)
        return gathered.view(size, *shard.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        stacked = grads[0].contiguous()
        shard = stacked.new_empty(stacked.shape[1:])
        dist.reduce_scatter_tensor(shard, stacked.flatten(0, 1), group=ctx.group)
        return shard, None

"""Attention over sharded sequences by an exchange of heads for tokens (Ulysses; Jacobs et al. 2023, arXiv:2309.14509).

One all-to-all gives each rank full sequences of some of the heads, torch's kernels for ``scaled_dot_product_attention``
compute them, and another all-to-all gives it all heads of its own tokens. A rank sends each shard of queries, keys,
values and outputs once, however many ranks there are.
"""

from collections.abc import Sequence
from math import lcm
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from accel_backends.parallel.attention.positions import SequenceSharding
from accel_state.errors import BackendError


def exchanged_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    group: dist.ProcessGroup,
    sharding: SequenceSharding,
    scale: float,
    causal: bool,
    padding: torch.Tensor | None = None,
) -> torch.Tensor:
    """Softmax attention of this rank's queries to the keys of all ranks; differentiable.

    All tensors are (batch, heads, local tokens, features), and rank ``r`` holds the ``r``-th part of the tokens.
    Queries may have a multiple of the heads of keys, which are repeated where the ranks do not divide them.

    Args:
        padding: (batch, tokens of full sequences), false where a token is padding that no query sees; or what
            ``visible`` makes of it, once for all layers; None: no padding.

    Raises:
        BackendError: the ranks do not divide the heads of queries, or a mask is not one of full sequences.

    Collective: every rank of the group must call this.
    """
    assert not sharding.balanced
    size, heads = sharding.size, key.shape[1]
    if query.shape[1] % size:
        raise BackendError(
            f"{query.shape[1]} heads of queries do not divide among {size} sequence-parallel ranks; nearest: sp_size="
            f"{nearest_degree(query.shape[1], size)}"
        )
    repeats = lcm(heads, size) // heads
    if repeats > 1:
        key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
    q, k, v = _heads_for_tokens((query, key, value), size, group)
    mask = visible(padding, causal=causal) if padding is not None and padding.ndim == 2 else padding
    if mask is not None and mask.shape[1:] not in ((1, 1, k.shape[2]), (1, k.shape[2], k.shape[2])):
        raise BackendError(
            f"sequence-parallel attention with a mask of shape {tuple(mask.shape)}; expected none, or one of padding, "
            f"(batch, {k.shape[2]})"
        )
    shared_by = q.shape[1] // k.shape[1]
    if mask is not None and shared_by > 1:  # on CUDA no fast kernel has both a mask and grouped heads
        k, v = k.repeat_interleave(shared_by, dim=1), v.repeat_interleave(shared_by, dim=1)
    output = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=causal and mask is None, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )
    return _tokens_for_heads(output, size, group)


def gathered_padding(shard: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Mask of full sequences (batch, tokens), from the masks of the tokens of all ranks.

    Collective: every rank of the group must call this.
    """
    size = dist.get_world_size(group)
    masks = shard.new_empty(size * shard.shape[0], *shard.shape[1:], dtype=torch.uint8)
    dist.all_gather_into_tensor(masks, shard.to(torch.uint8).contiguous(), group=group)
    full: torch.Tensor = masks.unflatten(0, (size, -1)).movedim(0, 1).flatten(1, 2)
    return full.bool()


def nearest_degree(heads: int, size: int) -> int:
    """Largest number of ranks up to ``size`` that divides the heads."""
    return next(ranks for ranks in range(min(heads, size), 0, -1) if heads % ranks == 0)


def visible(padding: torch.Tensor, *, causal: bool) -> torch.Tensor:
    """Mask (batch, 1, queries or 1, keys) that is true where a query sees a key."""
    seen = padding.bool()[:, None, None, :]
    if not causal:
        return seen
    length = padding.shape[1]
    return seen & torch.ones(length, length, dtype=torch.bool, device=padding.device).tril()


def _heads_for_tokens(shards: Sequence[torch.Tensor], size: int, group: dist.ProcessGroup) -> list[torch.Tensor]:
    """This rank's heads of full sequences, from all heads of its tokens; one all-to-all for all tensors."""
    split = [shard.unflatten(1, (size, -1)).movedim(1, 0) for shard in shards]
    rows = torch.cat([one.flatten(1) for one in split], dim=1)
    received = _exchanged(rows, group).split([one[0].numel() for one in split], dim=1)
    return [part.view(one.shape).movedim(0, 2).flatten(2, 3) for part, one in zip(received, split, strict=True)]


def _tokens_for_heads(full: torch.Tensor, size: int, group: dist.ProcessGroup) -> torch.Tensor:
    """All heads of this rank's tokens, from this rank's heads of full sequences."""
    split = full.unflatten(2, (size, -1)).movedim(2, 0)
    return _exchanged(split.flatten(1), group).view(split.shape).movedim(0, 1).flatten(1, 2)


def _exchanged(rows: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    received: torch.Tensor = _AllToAll.apply(rows, group)  # type: ignore[no-untyped-call]
    return received


class _AllToAll(torch.autograd.Function):
    """Sends row ``r`` to rank ``r``; the backward is the same exchange of the gradients."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        received = torch.empty_like(rows, memory_format=torch.contiguous_format)
        dist.all_to_all_single(received, rows.contiguous(), group=group)
        return received

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _exchanged(grads[0], ctx.group), None

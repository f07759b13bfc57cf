"""Attention of one block of queries and keys with its log-sum-exp, so that blocks can be merged exactly.

Queries may have a multiple of the heads of keys and values (grouped-query attention): consecutive query heads share one
head of keys. Scores are computed in the dtype of the accumulators, fp32 or fp64.
"""

import torch

Blocks = tuple[torch.Tensor, torch.Tensor]


def block_forward(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, scale: float, causal: bool) -> Blocks:
    """Output (batch, heads, queries, features) and log-sum-exp (batch, heads, queries) of softmax attention.

    A causal block is square: query ``i`` sees keys up to ``i``.
    """
    scores = _scores(query, key, scale=scale, causal=causal)
    largest = torch.logsumexp(scores, dim=-1)
    weights = torch.exp(scores - largest[..., None])
    return _ungrouped(weights @ value, query), _ungrouped(largest, query)


def block_backward(
    grad: torch.Tensor,
    delta: torch.Tensor,
    lse: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scale: float,
    causal: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of query, key and value from this block, given the log-sum-exp over all blocks.

    ``delta`` is the sum over features of the output times its gradient, as in FlashAttention-2 (Dao 2023,
    arXiv:2307.08691), by which the blocks' gradients are independent of each other.
    """
    heads = key.shape[1]
    weights = torch.exp(_scores(query, key, scale=scale, causal=causal) - _grouped(lse, heads)[..., None])
    ours = _grouped(grad, heads)
    of_scores = weights * (ours @ value.transpose(-1, -2) - _grouped(delta, heads)[..., None]) * scale
    of_query = _ungrouped(of_scores @ key, query)
    return of_query, of_scores.transpose(-1, -2) @ _grouped(query, heads), weights.transpose(-1, -2) @ ours


def merge(first: Blocks, second: Blocks) -> Blocks:
    """Output and log-sum-exp over the keys of two blocks (Liu et al. 2023, arXiv:2310.01889)."""
    (output, lse), (other, other_lse) = first, second
    total = torch.logaddexp(lse, other_lse)
    return output * torch.exp(lse - total)[..., None] + other * torch.exp(other_lse - total)[..., None], total


def _scores(query: torch.Tensor, key: torch.Tensor, *, scale: float, causal: bool) -> torch.Tensor:
    scores = _grouped(query, key.shape[1]) @ key.transpose(-1, -2) * scale
    if causal:
        queries, keys = query.shape[-2], key.shape[-2]
        later = torch.ones(queries, keys, dtype=torch.bool, device=query.device).triu(1)
        scores = scores.masked_fill(later.repeat(query.shape[1] // key.shape[1], 1), float("-inf"))
    return scores


def _grouped(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """Query heads that share a head of keys, one after the other along the dim of queries."""
    return tensor.reshape(tensor.shape[0], heads, -1, *tensor.shape[3:])


def _ungrouped(tensor: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(*query.shape[:3], *tensor.shape[3:])

"""Ring attention: keys and values travel around the ranks while each computes the block that it has.

Liu et al. 2023 (arXiv:2310.01889). No rank ever holds the keys of more than two ranks, and the exchange of the next
block overlaps with the computation of this one.
"""

from typing import Any

import torch
import torch.distributed as dist

from accel_backends.parallel.attention.blocks import block_backward, block_forward, merge
from accel_backends.parallel.attention.positions import SequenceSharding
from accel_precision.convert import accumulation_dtype


def ring_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    group: dist.ProcessGroup,
    sharding: SequenceSharding,
    scale: float,
    causal: bool,
) -> torch.Tensor:
    """Softmax attention of this rank's queries to the keys of all ranks; differentiable once.

    All tensors are (batch, heads, local tokens, features), sharded over the tokens as ``sharding`` says.

    Collective: every rank of the group must call this.
    """
    output: torch.Tensor = _RingAttention.apply(  # type: ignore[no-untyped-call]
        query, key, value, group, sharding, scale, causal
    )
    return output


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        group: dist.ProcessGroup,
        sharding: SequenceSharding,
        scale: float,
        causal: bool,
    ) -> torch.Tensor:
        rank, size, length = dist.get_rank(group), sharding.size, query.shape[-2]
        dtype = accumulation_dtype(query.dtype)
        features = key.shape[-1]
        q, held = query.to(dtype), torch.cat([key, value], dim=-1).contiguous()
        output = q.new_zeros(*q.shape[:-1], value.shape[-1])
        lse = q.new_full(q.shape[:-1], float("-inf"))
        for step in range(size):
            moving = _Rotation(held, group) if step < size - 1 else None
            block = sharding.block(rank, (rank - step) % size, length, causal=causal)
            if block is not None:
                k, v = held[..., block.keys, :].to(dtype).split([features, value.shape[-1]], dim=-1)
                here = block_forward(q[..., block.queries, :], k, v, scale=scale, causal=block.causal)
                before = output[..., block.queries, :], lse[..., block.queries]
                output[..., block.queries, :], lse[..., block.queries] = merge(before, here)
            if moving is not None:
                held = moving.wait()
        result = output.to(query.dtype)
        ctx.save_for_backward(query, key, value, result, lse)
        ctx.options = group, sharding, scale, causal
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Keys, values and their gradients travel around the ring once, so that each gradient ends where it began."""
        query, key, value, output, lse = ctx.saved_tensors
        group, sharding, scale, causal = ctx.options
        rank, size, length = dist.get_rank(group), sharding.size, query.shape[-2]
        dtype, widths = accumulation_dtype(query.dtype), [key.shape[-1], value.shape[-1]]
        q, grad = query.to(dtype), grads[0].to(dtype)
        delta = (grad * output.to(dtype)).sum(-1)
        of_query = torch.zeros_like(q)
        held = torch.cat([key, value], dim=-1).contiguous()
        of_held = torch.zeros(held.shape, dtype=dtype, device=held.device)
        for step in range(size):
            moving = _Rotation(held, group) if step < size - 1 else None
            block = sharding.block(rank, (rank - step) % size, length, causal=causal)
            if block is not None:
                k, v = held[..., block.keys, :].to(dtype).split(widths, dim=-1)
                queries = block.queries
                found = block_backward(
                    grad[..., queries, :],
                    delta[..., queries],
                    lse[..., queries],
                    q[..., queries, :],
                    k,
                    v,
                    scale=scale,
                    causal=block.causal,
                )
                of_query[..., queries, :] += found[0]
                of_held[..., block.keys, :] += torch.cat(found[1:], dim=-1)
            if moving is not None:
                held = moving.wait()
            of_held = _Rotation(of_held, group).wait()
        of_key, of_value = of_held.split(widths, dim=-1)
        return of_query.to(query.dtype), of_key.to(key.dtype), of_value.to(value.dtype), None, None, None, None


class _Rotation:
    """A tensor on its way to the next rank of the group, in exchange for that of the previous rank."""

    def __init__(self, tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        self._received = torch.empty_like(tensor)
        to, source = (dist.get_global_rank(group, other % size) for other in (rank + 1, rank - 1))
        operations = [
            dist.P2POp(dist.isend, tensor, to, group),
            dist.P2POp(dist.irecv, self._received, source, group),
        ]
        self._works = dist.batch_isend_irecv(operations) if size > 1 else []
        # The sent tensor must live until the exchange is over.
        self._sent = tensor

    def wait(self) -> torch.Tensor:
        """Waits for the exchange; returns the tensor of the previous rank, or with one rank the same tensor."""
        if not self._works:
            return self._sent
        for work in self._works:
            work.wait()
        return self._received

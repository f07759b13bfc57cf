"""Exchange of the shards of a fused projection: every rank receives its slice of each of the fused matrices."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True, slots=True)
class Exchange:
    """Rows that one rank sends to and receives from every other rank of a group.

    A fused dim is several matrices one after the other (``parts``, for example query, key and value). A DTensor holds
    contiguous shards of it; computation needs on each rank the rank's slice of every part. Both orders are ascending,
    so the received rows are in place, and only the rows to send have to be sorted by receiver.
    """

    order: tuple[int, ...]
    sent: tuple[int, ...]
    received: tuple[int, ...]

    @classmethod
    def of(cls, parts: Sequence[int], rank: int, size: int) -> "Exchange":
        """Exchange of ``rank`` among ``size`` ranks, all of which divide every part."""
        held = sum(parts) // size
        needed = [[row for rows in _slices(parts, other, size) for row in rows] for other in range(size)]
        by_receiver = [[row - rank * held for row in rows if row // held == rank] for rows in needed]
        return cls(
            order=tuple(row for rows in by_receiver for row in rows),
            sent=tuple(len(rows) for rows in by_receiver),
            received=tuple(sum(row // held == other for row in needed[rank]) for other in range(size)),
        )


def _slices(parts: Sequence[int], rank: int, size: int) -> list[range]:
    found, start = [], 0
    for part in parts:
        share = part // size
        found.append(range(start + rank * share, start + (rank + 1) * share))
        start += part
    return found


def exchanged(shard: torch.Tensor, dim: int, exchange: Exchange, group: dist.ProcessGroup) -> torch.Tensor:
    """Returns this rank's slice of every part, from the contiguous shards of all ranks; differentiable.

    One all-to-all moves the rows, and another one in the backward moves their gradients back.

    Collective: every rank of the group must call this.
    """
    slices: torch.Tensor = _ExchangedShards.apply(shard, dim, exchange, group)  # type: ignore[no-untyped-call]
    return slices


class _ExchangedShards(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shard: torch.Tensor, dim: int, exchange: Exchange, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.dim, ctx.exchange, ctx.group = dim, exchange, group
        rows = shard.movedim(dim, 0)[list(exchange.order)]
        return _all_to_all(rows, exchange.sent, exchange.received, group).movedim(0, dim).contiguous()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        exchange: Exchange = ctx.exchange
        sorted_rows = _all_to_all(grads[0].movedim(ctx.dim, 0), exchange.received, exchange.sent, ctx.group)
        rows = torch.empty_like(sorted_rows)
        rows[list(exchange.order)] = sorted_rows
        return rows.movedim(0, ctx.dim).contiguous(), None, None, None


def _all_to_all(
    rows: torch.Tensor, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup
) -> torch.Tensor:
    output = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(output, rows.contiguous(), list(received), list(sent), group=group)
    return output

"""Every position has one rank, and every visible score is computed once."""

import pytest
import torch

from accel_backends.parallel.attention.positions import SequenceSharding
from accel_backends.parallel.exchange import Exchange


@pytest.mark.parametrize("balanced", [True, False])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_positions_are_divided(size, balanced):
    sharding = SequenceSharding(size, balanced)
    parts = [sharding.positions(24, rank) for rank in range(size)]
    assert torch.equal(torch.cat(parts).sort().values, torch.arange(24))
    assert all(torch.equal(part, part.sort().values) for part in parts)


@pytest.mark.parametrize("balanced", [True, False])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_blocks_are_the_causal_scores(size, balanced):
    sharding, length = SequenceSharding(size, balanced), 24 // size
    computed = torch.zeros(24, 24, dtype=torch.int)
    for rank in range(size):
        for source in range(size):
            block = sharding.block(rank, source, length, causal=True)
            if block is None:
                continue
            queries = sharding.positions(24, rank)[block.queries]
            keys = sharding.positions(24, source)[block.keys]
            scores = torch.ones(len(queries), len(keys), dtype=torch.int)
            computed[queries[:, None], keys[None, :]] += scores.tril() if block.causal else scores
    assert torch.equal(computed, torch.ones(24, 24, dtype=torch.int).tril())


def test_balanced_ranks_compute_as_many_scores():
    sharding = SequenceSharding(4)
    seen = [int((sharding.positions(64, rank) + 1).sum()) for rank in range(4)]
    assert len(set(seen)) == 1


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("parts", [(8, 8, 8), (16, 4, 4), (12,)])
def test_exchange_gives_each_rank_its_slice_of_each_part(size, parts):
    total = sum(parts)
    exchanges = [Exchange.of(parts, rank, size) for rank in range(size)]
    shards = torch.arange(total).chunk(size)
    sent = [list(shards[rank][list(one.order)].split(one.sent)) for rank, one in enumerate(exchanges)]
    for rank, one in enumerate(exchanges):
        received = torch.cat([rows[rank] for rows in sent])
        assert [len(rows[rank]) for rows in sent] == list(one.received)
        expected = torch.cat([part.chunk(size)[rank] for part in torch.arange(total).split(parts)])
        assert torch.equal(received, expected)

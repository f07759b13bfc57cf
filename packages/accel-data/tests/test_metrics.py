"""Gathered rows of a batch, each sample once."""

from dataclasses import replace

import pytest
import torch

from accel_data.metrics import gather_for_metrics
from accel_state import ParallelismConfig, Session

SPLIT = ParallelismConfig(dp_shard_size=2, tp_size=2)


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    ("counts", "kept"),
    [
        (None, [0, 1, 2, 3, 4, 5]),
        ((3, 3), [0, 1, 2, 3, 4, 5]),
        ((3, 1), [0, 1, 2, 3]),
        ((3, 0), [0, 1, 2]),
        ((2, -1), [0, 1]),
    ],
)
@pytest.mark.parametrize("kind", ["tensors", "lists", "arrays"])
def test_ranks_that_split_the_model_give_their_samples_once(
    rank: int, counts: tuple[int, ...] | None, kept: list[int], kind: str
) -> None:
    session = Session.open(cpu=True)
    topologies = [replace(session.topology, rank=one) for one in range(4)]
    shard_of = [SPLIT.data_shard(topology).index for topology in topologies]
    assert shard_of == [0, 0, 1, 1]
    if counts is not None and counts[shard_of[rank]] < 0:
        return  # has left the loop
    rows = torch.arange(3) + 3 * shard_of[rank]
    data = {"tensors": rows, "lists": rows.tolist(), "arrays": rows.numpy()}[kind]
    gathered = gather_for_metrics(session, data, counts, shard_of=shard_of)
    assert (gathered.tolist() if kind == "tensors" else gathered) == kept

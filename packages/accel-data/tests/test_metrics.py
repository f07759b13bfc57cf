"""Gathered rows of a batch, each sample once."""

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from accel_data.metrics import gather_for_metrics
from accel_state import DataError, ParallelismConfig, Session

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
@pytest.mark.sampled(4)
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
    gathered = gather_for_metrics(session, data, counts, rows=3, shard_of=shard_of)
    assert (gathered.tolist() if kind == "tensors" else gathered) == kept


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    ("counts", "kept"), [(None, [0.0, 1.0]), ((3, 3), [0.0, 1.0]), ((3, 1), [0.0, 1.0]), ((3, 0), [0.0])]
)
@pytest.mark.parametrize("shape", [(1,), ()], ids=["one row", "scalar"])
def test_means_of_a_batch_are_gathered_as_they_are(
    rank: int, counts: tuple[int, ...] | None, kept: list[float], shape: tuple[int, ...]
) -> None:
    session, shard_of = Session.open(cpu=True), [0, 0, 1, 1]
    mean = torch.tensor(float(shard_of[rank])).reshape(shape)
    rows = torch.arange(3) + 3 * shard_of[rank]
    both = gather_for_metrics(session, {"mean": mean, "rows": rows}, counts, rows=3, shard_of=shard_of)
    assert both["mean"].tolist() == kept
    of_samples = [3 * shard + place for shard, count in enumerate(counts or (3, 3)) for place in range(count)]
    assert both["rows"].tolist() == of_samples


@pytest.mark.ranks(2)
def test_a_mean_beside_a_shorter_last_batch_is_not_filled_with_zeros(rank: int) -> None:
    session = Session.open(cpu=True)
    assert gather_for_metrics(session, torch.tensor([rank + 1.0]), (4, 2)).tolist() == [1.0, 2.0]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("counts", [(3, 3), (3, 2), (2, 2), (3, 0), (3, -1)])
@pytest.mark.parametrize("kind", ["tensors", "lists", "arrays"])
@pytest.mark.sampled(4)
def test_several_rows_for_each_sample_are_kept_with_their_sample(rank: int, counts: tuple[int, int], kind: str) -> None:
    session = Session.open(cpu=True)
    if counts[rank] < 0:
        return  # has left the loop
    rows = (torch.arange(3) + 3 * rank).repeat_interleave(4)
    data = {"tensors": rows, "lists": rows.tolist(), "arrays": rows.numpy()}[kind]
    gathered = gather_for_metrics(session, data, counts, rows=3)
    expected = [3 * one + place for one in range(2) for place in range(counts[one]) for _ in range(4)]
    assert (gathered.tolist() if kind == "tensors" else gathered) == expected


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.ranks(2))])
@pytest.mark.parametrize(
    "kind",
    [iter, tuple, range, lambda rows: map(int, rows), deque],
    ids=["iterator", "tuple", "range", "map", "deque"],
)
def test_iterators_are_rows_too(ranks: int, kind: Callable[[range], Any]) -> None:
    session = Session.open(cpu=True)
    counts = (3, 1)[:ranks]
    rows = range(3 * session.rank, 3 * session.rank + 3)
    data = rows if kind is range else kind(rows)
    assert gather_for_metrics(session, data, counts, rows=3) == [0, 1, 2, 3][: sum(counts)]


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.ranks(2))])
def test_a_set_has_no_rows(ranks: int) -> None:
    with pytest.raises(DataError, match="was given a set, whose items have no order"):
        gather_for_metrics(Session.open(cpu=True), {"a", "b"}, None)


@pytest.mark.ranks(2)
def test_a_matrix_of_classes_is_gathered_in_full(rank: int) -> None:
    session, confusion = Session.open(cpu=True), torch.eye(10)
    for counts in [(4, 4), (4, 2), (3, 3)]:
        assert torch.equal(gather_for_metrics(session, confusion, counts, rows=4), torch.cat([confusion] * 2))

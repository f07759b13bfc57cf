"""``gather_for_metrics`` gives every sample once, whatever the sharding repeated or cut."""

import itertools
from dataclasses import replace

import pytest
import torch
from torch.utils.data import DataLoader

from accel import Accelerator, DataLoaderConfiguration
from accel.metrics import gather_for_metrics
from accel_state import ParallelismConfig, Session

GRID = list(itertools.product(range(1, 41), range(1, 8)))
SAMPLE = [(1, 1), (1, 7), (2, 3), (3, 2), (5, 4), (7, 7), (11, 2), (13, 5), (16, 4), (23, 3), (40, 7)]


def expected(n: int, batch: int, ranks: int, drop_last: bool, even: bool) -> list[int]:
    """What one process would see: all samples, less the steps that ``drop_last`` leaves out."""
    if not drop_last:
        return list(range(n))
    return list(range(n // (batch * ranks) * batch * ranks))


def check(cases: list[tuple[int, int]], drop_last: bool, even: bool) -> None:
    options = DataLoaderConfiguration(even_batches=even)
    accelerator = Accelerator(cpu=True, dataloader_config=options)
    ranks = accelerator.num_processes
    for n, batch in cases:
        loader = accelerator.prepare_data_loader(DataLoader(range(n), batch_size=batch, drop_last=drop_last))
        seen: list[int] = []
        objects: list[str] = []
        for rows in loader:
            gathered = accelerator.gather_for_metrics({"rows": rows, "pair": (rows, rows * 2)})
            assert torch.equal(gathered["pair"][1], gathered["rows"] * 2)
            seen += gathered["rows"].tolist()
            objects += accelerator.gather_for_metrics([f"s{row}" for row in rows.tolist()])
        if even or accelerator.process_index == 0:
            assert seen == expected(n, batch, ranks, drop_last, even), (n, batch)
            assert objects == [f"s{row}" for row in seen], (n, batch)


@pytest.mark.parametrize("even", [True, False])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(
    "ranks", [1, pytest.param(2, marks=pytest.mark.ranks(2)), pytest.param(4, marks=pytest.mark.ranks(4))]
)
def test_every_sample_once_on_a_sample_of_the_grid(ranks: int, drop_last: bool, even: bool) -> None:
    check(SAMPLE, drop_last, even)


@pytest.mark.slow
@pytest.mark.parametrize("even", [True, False])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("ranks", [1, *(pytest.param(n, marks=pytest.mark.ranks(n, timeout=280)) for n in (2, 3, 4))])
def test_every_sample_once_on_the_whole_grid(ranks: int, drop_last: bool, even: bool) -> None:
    check(GRID, drop_last, even)


@pytest.mark.ranks(2)
def test_scalars_and_unrelated_shapes_are_not_cut(rank: int) -> None:
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare_data_loader(DataLoader(range(3), batch_size=2))
    for _ in loader:
        assert accelerator.gather_for_metrics(torch.tensor(float(rank))).tolist() == [0.0, 1.0]


@pytest.mark.ranks(2)
def test_outside_of_a_loop_everything_is_kept(rank: int) -> None:
    accelerator = Accelerator(cpu=True)
    for _ in accelerator.prepare_data_loader(DataLoader(range(3), batch_size=2)):
        pass
    assert accelerator.gather_for_metrics(torch.arange(2)).tolist() == [0, 1, 0, 1]


@pytest.mark.ranks(2)
def test_an_evaluation_inside_of_training_is_cut_by_its_own_loader(rank: int) -> None:
    accelerator = Accelerator(cpu=True)
    outer = accelerator.prepare_data_loader(DataLoader(range(8), batch_size=2))
    inner = accelerator.prepare_data_loader(DataLoader(range(5), batch_size=2))
    for _ in outer:
        seen = [row for rows in inner for row in accelerator.gather_for_metrics(rows).tolist()]
        assert seen == [0, 1, 2, 3, 4]
        assert accelerator.clock.active_loader is outer


@pytest.mark.ranks(2)
def test_breaking_out_leaves_nothing_behind(rank: int) -> None:
    accelerator = Accelerator(cpu=True)
    for _ in accelerator.prepare_data_loader(DataLoader(range(8), batch_size=2)):
        break
    assert accelerator.gradient_state.active_dataloader is None


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
@pytest.mark.parametrize("as_objects", [False, True], ids=["tensors", "objects"])
def test_ranks_that_split_the_model_give_their_samples_once(
    rank: int, counts: tuple[int, ...] | None, kept: list[int], as_objects: bool
) -> None:
    session = Session.open(cpu=True)
    topologies = [replace(session.topology, rank=one) for one in range(4)]
    shard_of = [SPLIT.data_shard(topology).index for topology in topologies]
    assert shard_of == [0, 0, 1, 1]
    if counts is not None and counts[shard_of[rank]] < 0:
        return  # has left the loop
    rows = torch.arange(3) + 3 * shard_of[rank]
    data = rows.tolist() if as_objects else rows
    gathered = gather_for_metrics(session, data, counts, shard_of=shard_of)
    assert (gathered if as_objects else gathered.tolist()) == kept


@pytest.mark.ranks(4)
def test_the_shards_of_ranks_follow_the_degrees(rank: int) -> None:
    accelerator = Accelerator(cpu=True)
    assert accelerator._shards_of_ranks() is None
    accelerator.parallelism_config = SPLIT
    accelerator.data_shard = SPLIT.data_shard(accelerator.session.topology)
    assert accelerator._shards_of_ranks() == [0, 0, 1, 1]

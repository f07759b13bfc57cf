"""Which samples each rank gets, row by row, and the same by computation, by walking and from a prepared loader."""

import ast
from typing import NamedTuple

import pytest
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from accel_data import (
    BatchSamplerShard,
    ByIndex,
    ByNode,
    Cursor,
    Elastic,
    LoaderOptions,
    Share,
    prepare_loader,
    real_counts,
)
from accel_data.map.sharding import batches_of, wrap
from accel_state.errors import ConfigError, DataError
from accel_state.parallelism.config import DataShard

# mode, batch size, even, drop_last, samples | batches of rank 0/1 | last two batches of rank 0 | of rank 1
TABLE = """
    shard 3 even keep 24 | 4/4 | [12,13,14] [18,19,20] | [15,16,17] [21,22,23]
    shard 3 even keep 22 | 4/4 | [12,13,14] [18,19,20] | [15,16,17] [21,0,1]
    shard 3 even keep 21 | 4/4 | [12,13,14] [18,19,20] | [15,16,17] [0,1,2]
    shard 3 even keep 20 | 4/4 | [12,13,14] [18,19,0] | [15,16,17] [1,2,3]
    shard 3 even keep 2 | 1/1 | [0,1,0] | [1,0,1]
    shard 3 even drop 24 | 4/4 | [12,13,14] [18,19,20] | [15,16,17] [21,22,23]
    shard 3 even drop 22 | 3/3 | [6,7,8] [12,13,14] | [9,10,11] [15,16,17]
    shard 3 even drop 21 | 3/3 | [6,7,8] [12,13,14] | [9,10,11] [15,16,17]
    shard 3 even drop 20 | 3/3 | [6,7,8] [12,13,14] | [9,10,11] [15,16,17]
    shard 3 even drop 2 | 0/0 | - | -
    shard 3 uneven keep 24 | 4/4 | [12,13,14] [18,19,20] | [15,16,17] [21,22,23]
    shard 3 uneven keep 22 | 4/4 | [12,13,14] [18,19,20] | [15,16,17] [21]
    shard 3 uneven keep 21 | 4/3 | [12,13,14] [18,19,20] | [9,10,11] [15,16,17]
    shard 3 uneven keep 20 | 4/3 | [12,13,14] [18,19] | [9,10,11] [15,16,17]
    shard 3 uneven keep 2 | 1/0 | [0,1] | -
    shard 3 uneven drop 24 | 4/4 | [12,13,14] [18,19,20] | [15,16,17] [21,22,23]
    shard 3 uneven drop 22 | 3/3 | [6,7,8] [12,13,14] | [9,10,11] [15,16,17]
    shard 3 uneven drop 21 | 3/3 | [6,7,8] [12,13,14] | [9,10,11] [15,16,17]
    shard 3 uneven drop 20 | 3/3 | [6,7,8] [12,13,14] | [9,10,11] [15,16,17]
    shard 3 uneven drop 2 | 0/0 | - | -
    split 4 even keep 24 | 6/6 | [16,17] [20,21] | [18,19] [22,23]
    split 4 even keep 22 | 6/6 | [16,17] [20,21] | [18,19] [0,1]
    split 4 even keep 21 | 6/6 | [16,17] [20,0] | [18,19] [1,2]
    split 4 even keep 20 | 5/5 | [12,13] [16,17] | [14,15] [18,19]
    split 4 even keep 2 | 1/1 | [0,1] | [0,1]
    split 4 even drop 24 | 6/6 | [16,17] [20,21] | [18,19] [22,23]
    split 4 even drop 22 | 5/5 | [12,13] [16,17] | [14,15] [18,19]
    split 4 even drop 21 | 5/5 | [12,13] [16,17] | [14,15] [18,19]
    split 4 even drop 20 | 5/5 | [12,13] [16,17] | [14,15] [18,19]
    split 4 even drop 2 | 0/0 | - | -
    split 4 uneven keep 24 | 6/6 | [16,17] [20,21] | [18,19] [22,23]
    split 4 uneven keep 22 | 6/5 | [16,17] [20,21] | [14,15] [18,19]
    split 4 uneven keep 21 | 6/5 | [16,17] [20] | [14,15] [18,19]
    split 4 uneven keep 20 | 5/5 | [12,13] [16,17] | [14,15] [18,19]
    split 4 uneven keep 2 | 1/0 | [0,1] | -
    split 4 uneven drop 24 | 6/6 | [16,17] [20,21] | [18,19] [22,23]
    split 4 uneven drop 22 | 5/5 | [12,13] [16,17] | [14,15] [18,19]
    split 4 uneven drop 21 | 5/5 | [12,13] [16,17] | [14,15] [18,19]
    split 4 uneven drop 20 | 5/5 | [12,13] [16,17] | [14,15] [18,19]
    split 4 uneven drop 2 | 0/0 | - | -
"""


class Row(NamedTuple):
    split: bool
    batch_size: int
    even: bool
    drop_last: bool
    size: int
    counts: tuple[int, int]
    tails: tuple[list[list[int]], list[list[int]]]


def parse(line):
    facts, counts, *tails = (part.strip() for part in line.split("|"))
    mode, batch_size, even, drop, size = facts.split()
    lists = [[] if tail == "-" else [ast.literal_eval(batch) for batch in tail.split()] for tail in tails]
    first, second = map(int, counts.split("/"))
    return Row(
        mode == "split", int(batch_size), even == "even", drop == "drop", int(size), (first, second), tuple(lists)
    )


ROWS = [pytest.param(parse(line), id=line.split("|")[0].strip()) for line in TABLE.strip().splitlines()]
RANKS = [DataShard(0, 2), DataShard(1, 2)]


def plain_loader(row):
    return DataLoader(range(row.size), batch_size=row.batch_size, drop_last=row.drop_last)


def loaders(size, batch_size, ranks, **options):
    drop_last = options.pop("drop_last", False)
    return [
        prepare_loader(
            DataLoader(range(size), batch_size=batch_size, drop_last=drop_last),
            DataShard(rank, ranks),
            options=LoaderOptions(**options),
        )
        for rank in range(ranks)
    ]


@pytest.mark.parametrize("row", ROWS)
def test_prepared_loader_gives_the_tabled_batches(row):
    options = LoaderOptions(split_batches=row.split, even_batches=row.even)
    prepared = [prepare_loader(plain_loader(row), shard, options=options) for shard in RANKS]
    batches = [[batch.tolist() for batch in loader] for loader in prepared]
    assert tuple(map(len, batches)) == row.counts
    assert tuple(map(len, prepared)) == row.counts
    assert tuple(rank[-2:] for rank in batches) == row.tails


@pytest.mark.parametrize("row", ROWS)
def test_batch_sampler_shard_gives_the_tabled_batches(row):
    inner = BatchSampler(SequentialSampler(range(row.size)), row.batch_size, row.drop_last)
    shards = [BatchSamplerShard(inner, 2, rank, row.split, row.even) for rank in range(2)]
    batches = [list(shard) for shard in shards]
    assert tuple(map(len, batches)) == row.counts
    assert tuple(map(len, shards)) == row.counts
    assert tuple(rank[-2:] for rank in batches) == row.tails


class CustomSampler:
    """Indices that nobody but this class can know."""

    def __init__(self, size):
        self.size = size

    def __iter__(self):
        return iter(range(self.size))

    def __len__(self):
        return self.size


@pytest.mark.parametrize("row", ROWS)
def test_walking_a_custom_sampler_gives_the_same_batches_as_computing(row):
    options = LoaderOptions(split_batches=row.split, even_batches=row.even)
    sampler = CustomSampler(row.size)
    prepared = [
        prepare_loader(
            DataLoader(range(row.size), batch_size=row.batch_size, drop_last=row.drop_last, sampler=sampler),
            shard,
            options=options,
        )
        for shard in RANKS
    ]
    batches = [[batch.tolist() for batch in loader] for loader in prepared]
    assert tuple(map(len, batches)) == tuple(map(len, prepared)) == row.counts
    assert tuple(rank[-2:] for rank in batches) == row.tails


DYNAMIC = [[0, 1, 2], [3, 4], [5, 6, 7, 8], [9, 10]]
THREE = [[0], [1, 2], [3, 4, 5], [6], [7, 8], [9, 10, 11], [12, 13]]


class Batches(list):
    """A batch sampler without ``batch_size``."""


class DroppingBatches(list):
    drop_last = True


@pytest.mark.parametrize(
    ("batches", "ranks", "even", "expected"),
    [
        (Batches(DYNAMIC), 2, True, [[[0, 1, 2], [5, 6, 7, 8]], [[3, 4], [9, 10]]]),
        (Batches([*DYNAMIC, [11]]), 2, True, [[[0, 1, 2], [5, 6, 7, 8], [11]], [[3, 4], [9, 10], [0, 1, 2]]]),
        (Batches([*DYNAMIC, [11]]), 2, False, [[[0, 1, 2], [5, 6, 7, 8], [11]], [[3, 4], [9, 10]]]),
        (
            Batches(THREE),
            3,
            True,
            [[[0], [6], [12, 13]], [[1, 2], [7, 8], [0]], [[3, 4, 5], [9, 10, 11], [1, 2]]],
        ),
        (Batches([[4, 5]]), 3, True, [[[4, 5]], [[4, 5]], [[4, 5]]]),
        (DroppingBatches([*DYNAMIC, [11]]), 2, True, [[[0, 1, 2], [5, 6, 7, 8]], [[3, 4], [9, 10]]]),
    ],
)
def test_batches_of_any_size_are_handed_out_whole(batches, ranks, even, expected):
    assert [list(BatchSamplerShard(batches, ranks, rank, even_batches=even)) for rank in range(ranks)] == expected
    prepared = [
        prepare_loader(
            DataLoader(range(20), batch_sampler=batches),
            DataShard(rank, ranks),
            options=LoaderOptions(even_batches=even),
        )
        for rank in range(ranks)
    ]
    assert [[batch.tolist() for batch in loader] for loader in prepared] == expected
    assert [len(loader) for loader in prepared] == [len(rank) for rank in expected]


def test_split_batches_without_batch_size_says_what_is_missing():
    with pytest.raises(ValueError, match="split_batches"):
        BatchSamplerShard(Batches(DYNAMIC), 2, 0, split_batches=True)


def test_split_batches_that_cannot_be_cut_names_the_nearest_that_can():
    with pytest.raises(ConfigError, match=r"round multiple.*2 or 4"):
        prepare_loader(DataLoader(range(9), batch_size=3), DataShard(0, 2), options=LoaderOptions(split_batches=True))


def test_tensor_parallel_peers_get_identical_batches():
    first, second = (
        prepare_loader(
            DataLoader(range(20), batch_size=3, shuffle=True), DataShard(1, 2), options=LoaderOptions(data_seed=5)
        )
        for _ in range(2)
    )
    assert [batch.tolist() for batch in first] == [batch.tolist() for batch in second]


@pytest.mark.parametrize("size", [5, 8, 23, 24, 40])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("even", [False, True])
@pytest.mark.parametrize(("ranks", "num_nodes"), [(4, 2), (6, 3), (3, 3), (4, 1)])
def test_by_node_reads_each_sample_once_and_only_from_its_own_range(size, drop_last, even, ranks, num_nodes):
    sharding = ByNode(total=size, batch_size=2, num_ranks=ranks, num_nodes=num_nodes, even=even, drop_last=drop_last)
    seen = []
    for step in range(sharding.steps(0)):
        position = sharding.seek(0, step)
        for rank in range(ranks):
            rows = sharding.rows(position, rank)
            if rows is None:
                continue
            positions = [wrap(p, size, num_nodes) for p in rows.positions()]
            assert {p % num_nodes for p in positions} <= {rank // (ranks // num_nodes)}
            seen += positions[: rows.real]
    assert len(seen) == len(set(seen))
    assert len(seen) == (size // (2 * ranks) * 2 * ranks if drop_last else size)


def test_node_sharding_delivers_contiguous_ranges_of_the_dataset():
    prepared = loaders(40, 2, 4, sharding="node", num_nodes=2)
    indices = [sorted({int(i) for batch in loader for i in batch}) for loader in prepared]
    assert sorted(indices[0] + indices[1]) == list(range(20))
    assert sorted(indices[2] + indices[3]) == list(range(20, 40))


def test_node_sharding_of_uneven_ranks_says_so():
    with pytest.raises(DataError, match="3 data ranks"):
        loaders(40, 2, 3, sharding="node", num_nodes=2)


def test_node_without_samples_says_so():
    with pytest.raises(DataError, match="holds no sample"):
        [list(loader) for loader in loaders(1, 1, 2, sharding="node", num_nodes=2)]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("batch_size", [1, 2, 5])
@pytest.mark.parametrize("size", [1, 6, 7, 26, 42])
def test_elastic_gives_the_same_global_batches_on_any_number_of_ranks(ranks, batch_size, size):
    prepared = loaders(size, batch_size, ranks, global_batch_size=7)
    windows, current = [], []
    share = 0.0
    for step in zip(*prepared, strict=True):
        facts = [loader.window for loader in prepared]
        counts = prepared[0].real_counts
        assert {(fact.index, fact.size) for fact in facts} == {(facts[0].index, facts[0].size)}
        assert all(len(batch) <= batch_size for batch in step)
        share += sum(fact.share for fact in facts)
        current += [int(i) for batch, count in zip(step, counts, strict=True) for i in batch[:count]]
        if facts[0].index == facts[0].size - 1:
            windows.append(current)
            assert share / ranks == pytest.approx(1.0)
            current, share = [], 0.0
    assert not current
    assert windows == [list(range(first, min(first + 7, size))) for first in range(0, size, 7)]


def test_elastic_drop_last_drops_only_the_short_global_batch():
    prepared = loaders(20, 2, 3, global_batch_size=8, drop_last=True)
    real = 0
    for _ in zip(*prepared, strict=True):
        real += sum(prepared[0].real_counts)
    assert real == 16


def test_elastic_rank_without_a_part_gets_one_row_that_counts_nothing():
    sharding = Elastic(total=2, batch_size=4, num_ranks=4, global_batch=8)
    assert real_counts(sharding, 0, 4) == (0, 1, 0, 1)
    assert [sharding.rows(0, rank).count for rank in range(4)] == [1, 1, 1, 1]
    assert [sharding.window(0, rank).share for rank in range(4)] == [0.0, 2.0, 0.0, 2.0]


@pytest.mark.parametrize("start", [0, 2, 3, 10, 11, 12, 29, 33, 39])
@pytest.mark.parametrize(("batch_size", "ranks"), [(1, 1), (3, 1), (2, 3), (1, 2), (5, 4)])
@pytest.mark.parametrize("drop_last", [False, True])
def test_elastic_seek_agrees_with_single_steps(start, batch_size, ranks, drop_last):
    sharding = Elastic(total=40, batch_size=batch_size, num_ranks=ranks, global_batch=11, drop_last=drop_last)
    position, steps = start, 0
    while sharding.steps(position):
        assert sharding.seek(start, steps) == position
        position, steps = sharding.seek(position, 1), steps + 1
    assert sharding.steps(start) == steps


def test_elastic_continues_an_open_global_batch():
    sharding = Elastic(total=40, batch_size=1, num_ranks=2, global_batch=8)
    window = sharding.window(5, 0)
    assert window.index > 0
    assert window.size - window.index == 2
    assert sharding.seek(5, 2) == 8


def pairs(cursor, shard):
    """Two samples for rank 0 and one for every other rank."""
    left = 9 - cursor.samples
    if not left:
        return None
    first = 0 if shard.index == 0 else 1 + shard.index
    mine = range(first, min(first + (2 if shard.index == 0 else 1), left))
    return Share([cursor.samples + i for i in mine], min(1 + shard.count, left))


def test_a_users_function_decides_what_each_rank_reads():
    prepared = loaders(9, 4, 3, sharding=pairs)
    batches = [[batch.tolist() for batch in loader] for loader in prepared]
    assert batches == [[[0, 1], [4, 5], [8]], [[2], [6]], [[3], [7]]]


def test_a_users_function_is_resumable():
    loader, other = loaders(9, 4, 3, sharding=pairs)[:2]
    next(iter(loader))
    assert loader.position == Cursor(0, 4)
    other.load_state_dict(loader.state_dict())
    assert [batch.tolist() for batch in other] == [[6]]


def test_a_users_function_that_stands_still_is_refused():
    (loader,) = loaders(9, 4, 1, sharding=lambda cursor, shard: Share([0], 0))
    with pytest.raises(DataError, match="advances by 0"):
        list(loader)


@pytest.mark.parametrize("rank", range(3))
def test_batches_of_counts_what_comes(rank):
    sharding = ByIndex(total=10, batch_size=2, num_ranks=3, even=False)
    assert batches_of(sharding, 0, rank) == (2, 2, 1)[rank]

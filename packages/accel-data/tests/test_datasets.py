"""With the real Hugging Face ``datasets``: streams are sharded by themselves, sought, and resumed by other ranks."""

import json

import pytest
from torch.utils.data import DataLoader

from accel_data import LoaderOptions, ShuffleBuffer, prepare_loader
from accel_data.iterable.capabilities import StreamCapabilities, inspect_stream
from accel_state.errors import ConfigError
from accel_state.parallelism.config import DataShard

datasets = pytest.importorskip("datasets")
FILES, ROWS = 6, 5
TOTAL = list(range(FILES * ROWS))


def rows_of(files):
    for file in files:
        for row in range(ROWS):
            yield {"x": file * ROWS + row}


def stream(files=FILES):
    return datasets.IterableDataset.from_generator(rows_of, gen_kwargs={"files": list(range(files))})


def prepared(dataset, rank=0, ranks=1, *, options=None, **kwargs):
    options = options or LoaderOptions(dispatch_batches=False, even_batches=False)
    loader = DataLoader(dataset, **({"batch_size": 2} | kwargs))
    return prepare_loader(loader, DataShard(rank, ranks), options=options)


def listed(loader):
    return [batch["x"].tolist() for batch in loader]


def flat(batches):
    return [row for batch in batches for row in batch]


def stopped(loader, steps):
    passing = iter(loader)
    delivered = [next(passing)["x"].tolist() for _ in range(steps)]
    state = json.loads(json.dumps(loader.state_dict()))
    passing.close()
    return flat(delivered), state


def test_what_it_can_do_is_seen():
    assert inspect_stream(stream()) == StreamCapabilities(shardable=True, num_shards=FILES, seekable=True)
    assert inspect_stream(stream().map(lambda row: row)).seekable
    assert inspect_stream(stream().shard(num_shards=2, index=0)).num_shards == FILES // 2


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.filterwarnings("error:every reader of")
def test_each_rank_and_worker_reads_its_own_shards_once(ranks, workers):
    parts = [listed(prepared(stream(), rank, ranks, num_workers=workers)) for rank in range(ranks)]
    assert sorted(row for part in parts for row in flat(part)) == TOTAL
    files = [{row // ROWS for row in flat(part)} for part in parts]
    assert sum(map(len, files)) == FILES


@pytest.mark.filterwarnings("ignore:every reader of")
def test_fewer_shards_than_ranks_are_strided():
    parts = [listed(prepared(stream(2), rank, 3)) for rank in range(3)]
    assert sorted(row for part in parts for row in flat(part)) == list(range(2 * ROWS))


def test_what_the_user_has_split_is_left_alone():
    from datasets.distributed import split_dataset_by_node

    parts = [listed(prepared(split_dataset_by_node(stream(), rank=r, world_size=2), r, 2)) for r in range(2)]
    assert sorted(row for part in parts for row in flat(part)) == TOTAL
    options = LoaderOptions(exact_streams=True, dispatch_batches=False)
    with pytest.raises(ConfigError, match="it was split by node"):
        prepared(split_dataset_by_node(stream(), rank=0, world_size=2), 0, 2, options=options)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("steps", [1, 4])
def test_the_same_ranks_seek_with_the_datasets_own_state(workers, steps):
    def make(rank):
        return prepared(stream().map(lambda row: {"x": row["x"]}), rank, 2, num_workers=workers)

    for rank in range(2):
        whole = flat(listed(make(rank)))
        delivered, state = stopped(make(rank), steps)
        assert any(state["private"]["snapshots"])
        resumed = make(rank)
        resumed.load_state_dict(state)
        assert delivered + flat(listed(resumed)) == whole


@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize(("ranks", "others"), [(2, 1), (2, 3), (3, 2), (1, 4)])
@pytest.mark.filterwarnings("ignore:every reader of")
def test_other_numbers_of_ranks_go_on_inside_an_epoch(ranks, others, shuffled):
    def make(rank, ranks, batch_size):
        dataset = stream().shuffle(seed=5, buffer_size=4) if shuffled else stream()
        return prepared(dataset, rank, ranks, batch_size=batch_size)

    parts = [stopped(make(rank, ranks, 2), 3) for rank in range(ranks)]
    seen = [row for delivered, _ in parts for row in delivered]
    assert len({json.dumps({**state, "private": None}) for _, state in parts}) == 1
    for rank in range(others):
        loader = make(rank, others, 3)
        loader.load_state_dict({name: value for name, value in parts[0][1].items() if name != "private"})
        for batch in loader:
            counts = loader.real_counts
            rows = batch["x"].tolist()
            seen += rows if counts is None else rows[: max(counts[rank], 0)]
    assert sorted(seen) == TOTAL


@pytest.mark.parametrize(("before", "after"), [(2, 0), (0, 2), (2, 1)])
@pytest.mark.filterwarnings("ignore:every reader of")
def test_one_process_goes_on_with_other_workers(before, after):
    delivered, state = stopped(prepared(stream(), num_workers=before), 3)
    other = prepared(stream(), num_workers=after)
    other.load_state_dict(state)
    assert sorted(delivered + flat(listed(other))) == TOTAL
    assert sorted(flat(listed(other))) == TOTAL


def test_each_epoch_of_a_shuffled_stream_has_its_order_and_a_buffer_is_not_lost():
    def make():
        return prepared(stream().shuffle(seed=3, buffer_size=7))

    loader = make()
    first, second = flat(listed(loader)), flat(listed(loader))
    assert sorted(first) == sorted(second) == TOTAL
    assert first != second
    delivered, state = stopped(make(), 4)
    resumed = make()
    resumed.load_state_dict(state)
    assert delivered + flat(listed(resumed)) == first
    assert flat(listed(resumed)) == second


@pytest.mark.sampled(1)
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("ranks", [1, 2])
def test_our_shuffle_buffer_seeks_where_theirs_is_read_again(ranks, workers):
    # A state after each batch: otherwise a slow one defers the next, and the first has no state of the source yet.
    options = LoaderOptions(dispatch_batches=False, even_batches=False, use_stateful_dataloader=True)

    def make(rank):
        return prepared(ShuffleBuffer(stream(), 6, seed=2), rank, ranks, options=options, num_workers=workers)

    parts = []
    for rank in range(ranks):
        loader = make(rank)
        first, second = flat(listed(loader)), flat(listed(loader))
        assert first != second
        delivered, state = stopped(make(rank), 5)
        noted = [snapshot[1] for snapshot in state["private"]["snapshots"] if snapshot]
        assert any(one["source"] is not None for one in noted)
        resumed = make(rank)
        resumed.load_state_dict(state)
        assert delivered + flat(listed(resumed)) == first
        assert flat(listed(resumed)) == second
        parts += first
    assert sorted(parts) == TOTAL


@pytest.mark.ranks(2)
@pytest.mark.parametrize("workers", [0, 2])
def test_ranks_with_a_group_take_equally_many_steps_and_say_what_is_repeated(rank, world_size, workers):
    from accel_state.collectives.objects import all_gather_object

    options = LoaderOptions(dispatch_batches=False)
    loader = prepared(stream(3), rank, world_size, options=options, num_workers=workers)
    rows = []
    for batch in loader:
        counts = loader.real_counts
        rows.append(batch["x"].tolist() if counts is None else batch["x"].tolist()[: counts[rank]])
    everything = all_gather_object(rows)
    assert len({len(part) for part in everything}) == 1
    assert sorted(row for part in everything for row in flat(part)) == list(range(3 * ROWS))


@pytest.mark.parametrize("workers", [0, 1])
def test_map_style_datasets_are_read_in_an_order_of_ours(workers):
    def make(rank, ranks):
        table = datasets.Dataset.from_dict({"x": TOTAL}).with_format("torch")
        options = LoaderOptions(data_seed=4)
        return prepared(table, rank, ranks, options=options, shuffle=True, num_workers=workers)

    whole = flat(listed(make(0, 1)))
    delivered, state = stopped(make(0, 1), 4)
    parts = []
    for rank in range(2):
        other = make(rank, 2)
        other.load_state_dict(state)
        parts.append(listed(other))
    rest = [row for step in zip(*parts, strict=True) for batch in step for row in batch]
    assert sorted(whole) == TOTAL
    assert (delivered + rest)[: len(TOTAL)] == whole


@pytest.mark.parametrize("workers", [0, 2])
def test_concatenated_streams_resume_in_workers(workers):
    def loader():
        parts = [stream().map(lambda row: {"x": row["x"] + 100}), stream(4)]
        return prepared(datasets.concatenate_datasets(parts), 0, 2, num_workers=workers)

    delivered, state = stopped(loader(), 5)
    resumed = loader()
    resumed.load_state_dict(state)
    assert delivered + flat(listed(resumed)) == flat(listed(loader()))

"""Streams a dataset cut for some readers are read on by any others: nothing is lost, nothing comes twice."""

import json
from itertools import pairwise

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from accel_data import LoaderOptions, prepare_loader
from accel_data.iterable.reshard import MergedRemainder, ShardProgress
from accel_state.errors import DataStateError
from accel_state.parallelism.config import DataShard

pytestmark = pytest.mark.filterwarnings("ignore:every reader of")


class Files(IterableDataset):
    """Files of different lengths, dealt out to ranks and, with ``divides``, to workers."""

    def __init__(self, files, divides=True):
        self.files, self.divides = files, divides
        self.num_shards = len(files)

    def shard(self, num_shards, index):
        return Files(self.files[index::num_shards], self.divides)

    def __iter__(self):
        info = get_worker_info() if self.divides else None
        mine = self.files if info is None else self.files[info.id :: info.num_workers]
        return (element for file in mine for element in file)


def files_of(sizes):
    bounds = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
    return [list(range(a, b)) for a, b in pairwise(bounds)]


def prepared(dataset, rank, ranks, *, batch_size=2, even=False, **kwargs):
    options = LoaderOptions(dispatch_batches=False, even_batches=even)
    return prepare_loader(DataLoader(dataset, batch_size=batch_size, **kwargs), DataShard(rank, ranks), options=options)


def real(loader, batch, rank):
    counts = loader.real_counts
    return batch.tolist()[: len(batch) if counts is None else max(counts[rank], 0)]


def test_what_is_left_comes_in_the_order_of_those_who_left_it():
    left = ShardProgress(shards=2, workers=1, chunk=2, taken=(2, 2), turn=0, samples=4)
    assert list(MergedRemainder(Files(files_of([5, 3, 4, 1])), left)) == [2, 3, 7, 12, 4, 8, 9, 10, 11]
    left = ShardProgress(shards=1, workers=2, chunk=2, taken=(2, 0), turn=1, samples=2)
    assert list(MergedRemainder(Files(files_of([4, 3, 2])), left)) == [4, 5, 2, 3, 6, 7, 8]


def test_nobody_is_a_worker_afterwards():
    iterator = iter(MergedRemainder(Files(files_of([4, 3])), ShardProgress(1, 2, 2, (0, 0), 0, 0)))
    next(iterator)
    assert get_worker_info() is None


@settings(deadline=None, max_examples=60)
@given(st.data(), st.lists(st.integers(0, 9), min_size=5, max_size=9))
def test_any_chain_of_numbers_of_ranks_reads_a_sharded_dataset_once(data, sizes):
    files = files_of(sizes)
    seen, state = [], None
    for leg in range(4):
        ranks, batch = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 4))
        loaders = [prepared(Files(files), rank, ranks, batch_size=batch) for rank in range(ranks)]
        for loader in loaders:
            if state is not None:
                loader.load_state_dict(state)
                assert loader.state_dict()["source"].get("left") == state["source"].get("left")
        steps = data.draw(st.integers(0, 4)) if leg < 3 else None
        passes = [iter(loader) for loader in loaders]
        taken = 0
        while steps is None or taken < steps:
            batches = [next(one, None) for one in passes]
            if all(batch is None for batch in batches):
                break
            taken += 1
            for rank, batch in enumerate(batches):
                seen += [] if batch is None else real(loaders[rank], batch, rank)
        states = [loader.state_dict() for loader in loaders]
        state = json.loads(json.dumps(next((one for one in states if one["epoch"] == 0), states[0])))
        if state["epoch"] or state.get("ended"):
            break
    assert sorted(seen) == list(range(sum(sizes)))


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("before", "after"), [(2, 0), (2, 1), (1, 2)])
@pytest.mark.parametrize("steps", [1, 2, 5])
def test_a_dataset_that_divides_itself_is_read_on_by_other_workers(before, after, steps):
    files = files_of([5, 3, 4, 6])
    loader = prepared(Files(files), 0, 1, num_workers=before)
    passing = iter(loader)
    seen = [index for _ in range(steps) for index in next(passing).tolist()]
    state = loader.state_dict()
    state.pop("private", None)
    other = prepared(Files(files), 0, 1, num_workers=after)
    other.load_state_dict(state)
    seen += [index for batch in other for index in batch.tolist()]
    assert sorted(seen) == list(range(18))
    whole = sorted(index for batch in other for index in batch.tolist())
    assert whole == list(range(18))


def test_streams_divided_by_the_function_that_starts_workers_cannot_be_read_by_others():
    class Range(IterableDataset):
        start, step = 0, 1

        def __iter__(self):
            return iter(range(self.start, 12, self.step))

    def init(worker):
        info = get_worker_info()
        info.dataset.start, info.dataset.step = info.id, info.num_workers

    loader = prepared(Range(), 0, 1, num_workers=2, worker_init_fn=init)
    next(iter(loader))
    other = prepared(Range(), 0, 1, worker_init_fn=init)
    other.load_state_dict(loader.state_dict())
    with pytest.raises(DataStateError, match="worker_init_fn"):
        next(iter(other))


def gathered(value):
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def check_others_go_on(rank, ranks, steps, workers, others):
    """Ranks with a group know how far each other's streams were read; whoever goes on needs one rank's state only."""
    files = files_of([5, 9, 1, 7, 3, 8])
    loader = prepared(Files(files), rank, ranks, even=True, num_workers=workers)
    passing = iter(loader)
    seen = [real(loader, next(passing), rank) for _ in range(steps)]
    state = json.loads(json.dumps({**loader.state_dict(), "private": None}))
    passing.close()
    assert all(other == state for other in gathered(state))
    seen = [index for part in gathered(seen) for batch in part for index in batch]
    for other in range(others):
        loader = prepared(Files(files), other, others, even=True, batch_size=3)
        loader.load_state_dict(state)
        seen += [index for batch in loader for index in real(loader, batch, other)]
    assert sorted(seen) == list(range(33))


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("steps", "workers", "others"), [(1, 0, 3), (6, 0, 4), (3, 2, 1), (7, 2, 3), (4, 3, 3)])
def test_other_numbers_of_ranks_go_on_from_two(rank, world_size, steps, workers, others):
    check_others_go_on(rank, world_size, steps, workers, others)


@pytest.mark.ranks(4)
@pytest.mark.parametrize(("steps", "workers", "others"), [(2, 0, 2), (5, 0, 1), (2, 1, 3)])
def test_other_numbers_of_ranks_go_on_from_four(rank, world_size, steps, workers, others):
    check_others_go_on(rank, world_size, steps, workers, others)


class Seated(IterableDataset):
    """Its order depends on whether a worker reads it: Hugging Face streams shuffle another way in one."""

    def __iter__(self):
        info = get_worker_info()
        rows = list(range(24))
        if info is None:
            return iter(rows)
        return iter(rows[info.id :: info.num_workers][::-1])


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("before", "after"), [(1, 1), (1, 0), (1, 2), (0, 1), (2, 1)])
@pytest.mark.parametrize("keeps_private", [True, False])
def test_an_order_that_depends_on_a_worker_goes_on_where_it_was_left(before, after, keeps_private):
    expected = [index for batch in prepared(Seated(), 0, 1, num_workers=before) for index in batch.tolist()]
    loader = prepared(Seated(), 0, 1, num_workers=before)
    passing = iter(loader)
    seen = [index for _ in range(3) for index in next(passing).tolist()]
    state = loader.state_dict()
    if not keeps_private:
        state.pop("private", None)
    other = prepared(Seated(), 0, 1, num_workers=after)
    other.load_state_dict(state)
    seen += [index for batch in other for index in batch.tolist()]
    assert seen == expected


@pytest.mark.sampled(2)
@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.parametrize("dataset", [Files(files_of([5, 3, 14, 6])), Files(files_of([5, 3, 14, 6]), False), Seated()])
@pytest.mark.parametrize("skipped", [1, 5])
def test_skipped_batches_are_those_that_a_pass_would_deliver_first(dataset, workers, skipped):
    def batches(loader):
        return [batch.tolist() for batch in loader]

    loader = prepared(dataset, 0, 1, num_workers=workers)
    every = batches(prepared(dataset, 0, 1, num_workers=workers))
    other = loader.skipped(skipped)
    passing = iter(other)
    assert [next(passing).tolist() for _ in range(2)] == every[skipped : skipped + 2]
    state = other.state_dict()
    resumed = prepared(dataset, 0, 1, num_workers=workers)
    resumed.load_state_dict(state)
    assert batches(resumed) == every[skipped + 2 :]
    assert batches(resumed) == every
    assert batches(resumed.skipped(skipped)) == every[skipped:]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("even", [True, False])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.sampled(1)
def test_ranks_with_shards_of_their_own_skip_the_same_steps(rank, world_size, workers, even):
    def rows(loader):
        return [real(loader, batch, rank) for batch in loader]

    loader = prepared(Files(files_of([7, 3, 5, 6])), rank, world_size, even=even, num_workers=workers)
    every = rows(loader)
    assert rows(loader.skipped(2)) == every[2:]
    other = prepared(Files(files_of([7, 3, 5, 6])), rank, world_size, even=even, num_workers=workers)
    assert rows(other.skipped(2)) == every[2:]
    assert rows(other) == every


def test_a_state_is_loaded_where_as_many_batches_were_skipped():
    files = files_of([5, 3, 14, 6])
    writer = prepared(Files(files), 0, 1, num_workers=2)
    passing = iter(writer)
    seen = [index for _ in range(3) for index in next(passing).tolist()]
    state = writer.state_dict()
    loader = prepared(Files(files), 0, 1, num_workers=1)
    next(iter(loader.skipped(3)))
    loader.load_state_dict(state)
    assert sorted(seen + [index for batch in loader for index in batch.tolist()]) == list(range(28))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("how", ["skip", "gate"])
@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.parametrize("dataset", [Files(files_of([5, 3, 14, 6])), Files(files_of([5, 3, 14, 6]), False), Seated()])
def test_a_state_between_a_skip_and_the_first_batch_leads_to_the_batches_that_the_skip_leads_to(dataset, workers, how):
    """Samples alone do not say which batches a stream that divides itself has then behind it."""
    every = [batch.tolist() for batch in prepared(dataset, 0, 1, num_workers=workers)]
    state = state_behind_skip(prepared(dataset, 0, 1, num_workers=workers), 3, how)
    resumed = prepared(dataset, 0, 1, num_workers=workers)
    resumed.load_state_dict(state)
    assert [batch.tolist() for batch in resumed] == every[3:]
    assert [batch.tolist() for batch in resumed] == every


def state_behind_skip(loader, batches, how):
    """As a script saves it that looks before it reads, or a preemption that ends the pass before its first batch."""
    if how == "skip":
        loader.skip(batches)
        return json.loads(json.dumps(loader.state_dict()))
    states = []

    def gate(loader, batches):
        states.append(json.loads(json.dumps(loader.state_dict())))
        return
        yield

    other = loader.skipped(batches)
    other.gate = gate
    assert list(other) == []
    return states[0]


def test_a_skip_behind_a_skip_is_one_skip():
    dataset = Files(files_of([5, 3, 14, 6]))
    every = [batch.tolist() for batch in prepared(dataset, 0, 1, num_workers=2)]
    loader = prepared(dataset, 0, 1, num_workers=2)
    loader.skip(1)
    state = state_behind_skip(loader, 2, "skip")
    resumed = prepared(dataset, 0, 1, num_workers=2)
    resumed.load_state_dict(state)
    for one in (loader, resumed):
        assert [batch.tolist() for batch in one] == every[3:]


def test_a_state_between_a_skip_and_the_first_batch_is_refused_to_other_readers_with_what_works():
    files = files_of([5, 3, 14, 6])
    state = state_behind_skip(prepared(Files(files), 0, 1, num_workers=2), 3, "skip")
    for others in ({"num_workers": 1}, {"num_workers": 0}, {"num_workers": 2, "batch_size": 3}):
        other = prepared(Files(files), 0, 1, **others)
        with pytest.raises(
            DataStateError, match=r"between skip_first_batches and the first batch, by 1 ranks with 2 w"
        ):
            other.load_state_dict(state)
        assert len([index for batch in other for index in batch.tolist()]) == 28
    undivided = prepared(Files(files, False), 0, 1, num_workers=2)
    list(undivided)  # now it is known that its workers divide nothing: samples tell the position
    undivided.set_epoch(0)
    state = state_behind_skip(undivided, 3, "skip")
    other = prepared(Files(files, False), 0, 1, num_workers=1)
    other.load_state_dict(state)
    assert [index for batch in other for index in batch.tolist()] == list(range(6, 28))


def test_a_skip_behind_a_loaded_position_is_saved_with_that_position():
    dataset = Files(files_of([5, 3, 14, 6]))
    every = [batch.tolist() for batch in prepared(dataset, 0, 1, num_workers=2)]
    writer = prepared(dataset, 0, 1, num_workers=2)
    passing = iter(writer)
    for _ in range(3):
        next(passing)
    loader = prepared(dataset, 0, 1, num_workers=2)
    loader.load_state_dict(writer.state_dict())
    resumed = prepared(dataset, 0, 1, num_workers=2)
    resumed.load_state_dict(state_behind_skip(loader, 2, "skip"))
    for one in (loader, resumed):
        assert [batch.tolist() for batch in one] == every[5:]


def test_batches_are_skipped_after_an_epoch_that_was_read_as_one_stream():
    writer = [prepared(Files(files_of([5, 3, 14, 6])), rank, 2) for rank in range(2)]
    passing = [iter(loader) for loader in writer]
    for one in passing:
        next(one)
    for workers in (0, 2):
        loader = prepared(Files(files_of([5, 3, 14, 6])), 0, 1, num_workers=workers)
        loader.load_state_dict({**writer[0].state_dict(), "private": None})
        assert len([index for batch in loader for index in batch.tolist()]) == 24
        every = [batch.tolist() for batch in prepared(Files(files_of([5, 3, 14, 6])), 0, 1, num_workers=workers)]
        assert [batch.tolist() for batch in loader.skipped(2)] == every[2:]


def test_a_loaded_position_outlives_a_skip_that_nobody_reads():
    dataset = Files(files_of([5, 3, 14, 6]))
    every = [batch.tolist() for batch in prepared(dataset, 0, 1, num_workers=2)]
    writer = prepared(dataset, 0, 1, num_workers=2)
    passing = iter(writer)
    for _ in range(3):
        next(passing)
    for skipped in (2, 3, 4):
        loader = prepared(dataset, 0, 1, num_workers=2)
        loader.load_state_dict(writer.state_dict())
        loader.skipped(skipped)
        assert [batch.tolist() for batch in loader] == every[3:]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("how", ["skip", "gate"])
@pytest.mark.sampled(1)
def test_ranks_with_shards_of_their_own_save_between_a_skip_and_the_first_batch(rank, world_size, workers, how):
    def make():
        return prepared(Files(files_of([7, 3, 5, 6, 4, 9])), rank, world_size, even=True, num_workers=workers)

    def rows(loader):
        return [real(loader, batch, rank) for batch in loader]

    every = rows(make())
    state = state_behind_skip(make(), 2, how)
    assert len({str({**one, "private": None}) for one in gathered(state)}) == 1
    resumed = make()
    resumed.load_state_dict(state)
    assert rows(resumed) == every[2:]
    assert rows(resumed) == every

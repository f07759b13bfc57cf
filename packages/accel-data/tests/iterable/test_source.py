"""Iterable datasets behind a prepared loader: who reads what, and that a resumed stream goes on where it was left."""

import json
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from torch.utils.data._utils import worker as torch_worker

from accel_data.iterable import worker
from accel_data.iterable.stride import Stride
from accel_data.iterable.worker import StreamReader, WorkerInit
from accel_data.loader import PreparedLoader
from accel_data.loader_spec import LoaderSpec, open_source
from accel_data.options import LoaderOptions
from accel_data.prepare import prepare_loader
from accel_state.errors import ConfigError, DataError, DataStateError
from accel_state.parallelism.config import DataShard

pytestmark = pytest.mark.filterwarnings("ignore:every reader of")


class Numbers(IterableDataset):
    """Knows nothing of ranks and workers."""

    def __init__(self, n):
        self.n = n

    def __iter__(self):
        return iter(range(self.n))


class Sized(Numbers):
    def __len__(self):
        return self.n


class Seekable(Numbers):
    """Can say where it is, and counts what it really reads."""

    def __init__(self, n):
        super().__init__(n)
        self.position = self.reads = 0

    def __iter__(self):
        while self.position < self.n:
            self.position += 1
            self.reads += 1
            yield self.position - 1
        self.position = 0

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


class Shardable(Numbers):
    """Files of five elements that can be dealt out, like ``datasets`` does."""

    def __init__(self, files, shards=None, **marks):
        super().__init__(0)
        self.files = files
        self.num_shards = len(files) if shards is None else shards
        self.__dict__.update(marks)

    def shard(self, num_shards, index, contiguous=True):
        return Shardable(self.files[index::num_shards])

    def __iter__(self):
        return (element for file in self.files for element in range(file * 5, file * 5 + 5))


class WorkerAware(Numbers):
    """Divides itself among workers, as torch's documentation shows."""

    def __iter__(self):
        info = get_worker_info()
        return iter(range(self.n) if info is None else range(info.id, self.n, info.num_workers))


class LateAsker(Numbers):
    def __iter__(self):
        yield 0
        yield get_worker_info().id


class Epochs(Numbers):
    def __init__(self, n):
        super().__init__(n)
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        return iter(range(self.epoch * 100, self.epoch * 100 + self.n))


def prepared(dataset, rank=0, ranks=1, *, options=None, **kwargs):
    loader = DataLoader(dataset, **({"batch_size": 2} | kwargs))
    options = options or LoaderOptions()
    return PreparedLoader(open_source(LoaderSpec.of(loader, DataShard(rank, ranks), options)), options=options)


def listed(loader):
    return [batch.tolist() for batch in loader]


def everyone(dataset, ranks, **kwargs):
    return [listed(prepared(dataset, rank, ranks, **kwargs)) for rank in range(ranks)]


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_each_rank_gets_its_part_in_the_same_order_for_any_number_of_workers(workers):
    assert everyone(Numbers(10), 2, batch_size=4, num_workers=workers) == [
        [[0, 1, 2, 3], [8, 9, 0, 1]],
        [[4, 5, 6, 7], [2, 3, 4, 5]],
    ]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("cut", [1, 3])
@pytest.mark.sampled(1)
def test_the_last_batch_of_an_epoch_is_completed_alike_after_a_seek(workers, cut):
    for rank in range(3):
        whole = listed(prepared(Seekable(21), rank, 3, num_workers=workers))
        loader = prepared(Seekable(21), rank, 3, num_workers=workers)
        batches = iter(loader)
        read = [next(batches).tolist() for _ in range(cut)]
        resumed = prepared(Seekable(21), rank, 3, num_workers=workers)
        resumed.load_state_dict(loader.state_dict())
        assert read + listed(resumed) == whole
        assert whole[-1] == [[18, 19], [20, 0], [1, 2]][rank]


@pytest.mark.parametrize("workers", [0, 2])
def test_one_rank_reads_each_sample_once_and_ends_with_a_short_batch(workers):
    assert listed(prepared(Numbers(5), num_workers=workers)) == [[0, 1], [2, 3], [4]]


@pytest.mark.parametrize("workers", [1, 2])
def test_a_dataset_that_divides_itself_is_not_divided_again(workers):
    first, second = everyone(WorkerAware(24), 2, num_workers=workers)
    assert sorted(i for batch in first + second for i in batch) == list(range(24))
    assert len(first) == len(second) == 6


def test_dividing_in_worker_init_fn_is_seen_too():
    class Range(IterableDataset):
        start, step = 0, 1

        def __iter__(self):
            return iter(range(self.start, 12, self.step))

    def init(worker):
        info = get_worker_info()
        info.dataset.start, info.dataset.step = info.id, info.num_workers

    batches = listed(prepared(Range(), num_workers=2, worker_init_fn=init))
    assert batches == [[0, 2], [1, 3], [4, 6], [5, 7], [8, 10], [9, 11]]


def test_seeding_in_worker_init_fn_is_no_dividing():
    def init(worker):
        torch.manual_seed(get_worker_info().id + get_worker_info().seed % 7)

    assert listed(prepared(Numbers(6), num_workers=2, worker_init_fn=init)) == [[0, 1], [2, 3], [4, 5]]


def test_asking_too_late_is_an_error_not_a_loss(monkeypatch):
    # In this process: torch takes five seconds to end a worker that has raised.
    reader = StreamReader(LateAsker(4), Stride(), list, batched=True, shared=False)
    info = torch_worker.WorkerInfo(id=0, num_workers=2, seed=0, dataset=reader)
    monkeypatch.setattr(torch_worker, "_worker_info", info)
    WorkerInit(None, reader)(0)
    with pytest.raises(DataError, match="LateAsker asked which worker"):
        list(reader)


def test_a_dataset_that_can_is_asked_to_shard():
    loader = prepared(Shardable([0, 1, 2, 3]), 1, 2, batch_size=5)
    assert listed(loader) == [[5, 6, 7, 8, 9], [15, 16, 17, 18, 19]]
    assert isinstance(loader.dataset, Shardable)
    assert loader.dataset.files == [1, 3]


@pytest.mark.parametrize("marks", [{"_distributed": object()}, {"already_sharded": True}])
def test_a_dataset_that_was_sharded_is_left_alone(marks):
    assert everyone(Shardable([0, 1], **marks), 2, batch_size=5) == [[[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]] * 2


def test_the_user_can_say_that_it_is_sharded():
    options = LoaderOptions(already_sharded=True)
    assert everyone(Numbers(4), 2, options=options) == [[[0, 1], [2, 3]]] * 2


def test_batches_made_by_the_dataset_are_dealt_out_whole():
    class Batches(IterableDataset):
        def __iter__(self):
            return iter([torch.tensor([i]) for i in range(4)])

    assert everyone(Batches(), 2, batch_size=None) == [[[0], [2]], [[1], [3]]]


@pytest.mark.filterwarnings("default:every reader of")
def test_read_amplification_is_said_once_with_its_numbers():
    loader = prepared(Numbers(4), 0, 3, num_workers=2)
    with pytest.warns(RuntimeWarning, match=r"3 ranks x 2 workers = 6 times"):
        listed(loader)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        listed(loader)
        listed(prepared(Numbers(4), 1, 3, num_workers=2))
        listed(prepared(Numbers(4)))
        listed(prepared(Shardable([1, 2]), 0, 2))
        listed(prepared(WorkerAware(4), num_workers=2))


@pytest.mark.filterwarnings("default:every reader of")
def test_workers_that_all_read_the_shard_of_their_rank_are_said_too():
    loader = prepared(Shardable([0, 1, 2, 3]), 0, 2, num_workers=2)
    assert loader.read_amplification is None
    with pytest.warns(
        RuntimeWarning, match=r"get_worker_info\(\): 1 rank x 2 workers = 2 times .* shards, exact on as"
    ):
        listed(loader)
    assert loader.read_amplification == 2
    assert loader._source.strategy.name == "shards"


@pytest.mark.parametrize(("workers", "persistent"), [(0, False), (1, False), (2, True)])
def test_the_epoch_reaches_the_dataset_where_it_is_read(workers, persistent):
    loader = prepared(Epochs(2), num_workers=workers, persistent_workers=persistent)
    assert [listed(loader), listed(loader)] == [[[0, 1]], [[100, 101]]]
    loader.set_epoch(5)
    assert listed(loader) == [[500, 501]]


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("drop", [False, True])
@pytest.mark.parametrize("even", [False, True])
@pytest.mark.parametrize("n", [0, 3, 8, 10])
def test_the_length_of_a_sized_dataset_is_what_is_delivered(n, even, drop, split):
    options = LoaderOptions(even_batches=even, split_batches=split)
    for rank in range(2):
        loader = prepared(Sized(n), rank, 2, batch_size=4, drop_last=drop, options=options)
        assert len(loader) == len(listed(loader))


def test_an_unsized_dataset_has_no_length():
    with pytest.raises(TypeError, match="Numbers has no length"):
        len(prepared(Numbers(3)))


def test_the_end_and_the_padding_are_known():
    loader = prepared(Numbers(10), 1, 2, batch_size=4)
    seen = [(loader.end_of_dataloader, loader.remainder, loader.real_counts) for _ in loader]
    assert seen == [(False, -1, None), (True, 2, (2, 0))]


def real(loader, batch, rank):
    counts = loader.real_counts
    return batch.tolist()[: len(batch) if counts is None else max(counts[rank], 0)]


@settings(deadline=None, max_examples=60)
@given(st.data(), st.integers(0, 50))
def test_a_stream_is_read_once_over_any_chain_of_resumes(data, n):
    seen, state = [], None
    for leg in range(4):
        ranks, batch = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 5))
        dataset = data.draw(st.sampled_from([Numbers, Seekable]))
        loaders = [prepared(dataset(n), rank, ranks, batch_size=batch) for rank in range(ranks)]
        iterators = []
        for loader in loaders:
            if state is not None:
                loader.load_state_dict(state)
            iterators.append(iter(loader))
        steps = data.draw(st.integers(0, 4)) if leg < 3 else n + 1
        for _ in range(steps):
            if loaders[0].epoch > 0:
                break
            for rank, (loader, iterator) in enumerate(zip(loaders, iterators, strict=True)):
                got = next(iterator, None)
                seen += [] if got is None else real(loader, got, rank)
        states = [loader.state_dict() for loader in loaders]
        state = states[0]
        if state["epoch"] > 0:
            break
    assert sorted(seen) == list(range(n))


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("before", "after"), [(0, 2), (2, 0), (2, 1), (1, 2)])
@pytest.mark.parametrize("dataset", [Numbers, Seekable])
def test_workers_may_change_between_save_and_resume(before, after, dataset):
    loader = prepared(dataset(20), 1, 2, num_workers=before)
    iterator = iter(loader)
    got = [next(iterator).tolist() for _ in range(3)]
    state = loader.state_dict()
    other = prepared(dataset(20), 1, 2, num_workers=after)
    other.load_state_dict(state)
    assert got + listed(other) == [[2, 3], [6, 7], [10, 11], [14, 15], [18, 19]]


def test_a_seekable_dataset_is_not_read_again_from_the_front(monkeypatch):
    monkeypatch.setattr(worker, "_SNAPSHOT_SHARE", float("inf"))  # however slow the machine is just now
    loader = prepared(Seekable(1000))
    iterator = iter(loader)
    for _ in range(450):
        next(iterator)
    dataset = Seekable(1000)
    other = prepared(dataset)
    other.load_state_dict(loader.state_dict())
    assert next(iter(other)).tolist() == [900, 901]
    assert dataset.reads < 10


@pytest.mark.parametrize("steps", [1, 2, 3, 5])
@pytest.mark.sampled(1)
def test_a_dataset_that_divides_itself_goes_on_with_the_same_workers(steps):
    whole = listed(prepared(WorkerAware(20), num_workers=2))
    loader = prepared(WorkerAware(20), num_workers=2)
    iterator = iter(loader)
    for _ in range(steps):
        next(iterator)
    other = prepared(WorkerAware(20), num_workers=2)
    other.load_state_dict(loader.state_dict())
    assert listed(other) == whole[steps:]
    assert listed(other) == whole


@pytest.mark.parametrize("workers", [1, 2])
def test_a_position_of_one_stream_is_not_sought_in_divided_ones(workers):
    loader = prepared(WorkerAware(12))
    iterator = iter(loader)
    assert next(iterator).tolist() == [0, 1]
    other = prepared(WorkerAware(12), num_workers=workers)
    other.load_state_dict(loader.state_dict())
    assert listed(other) == [[2, 3], [4, 5], [6, 7], [8, 9], [10, 11]]
    assert listed(other) == listed(prepared(WorkerAware(12), num_workers=workers))


def test_exact_streams_hold_for_any_workers_even_of_a_dataset_that_divides_itself():
    options = LoaderOptions(exact_streams=True)
    loader = prepared(WorkerAware(12), 1, 2, num_workers=2, options=options)
    iterator = iter(loader)
    assert [next(iterator).tolist() for _ in range(2)] == [[2, 3], [6, 7]]
    other = prepared(WorkerAware(12), 1, 2, num_workers=1, options=options)
    other.load_state_dict(loader.state_dict())
    assert listed(other) == [[10, 11]]


def test_living_workers_divide_again_after_a_full_pass():
    def make():
        return prepared(WorkerAware(12), num_workers=2, persistent_workers=True)

    loader = make()
    loader.load_state_dict({**prepared(WorkerAware(12)).state_dict(), "samples": 2})
    assert listed(loader) == [[2, 3], [4, 5], [6, 7], [8, 9], [10, 11]]
    divided = [[0, 2], [1, 3], [4, 6], [5, 7], [8, 10], [9, 11]]
    assert [listed(loader), listed(loader)] == [divided, divided]


def test_a_position_in_native_shards_goes_on_with_the_same_ranks():
    loader = prepared(Shardable([0, 1, 2, 3]), 1, 2)
    iterator = iter(loader)
    assert [next(iterator).tolist() for _ in range(2)] == [[5, 6], [7, 8]]
    for private in (True, False):
        state = loader.state_dict()
        if not private:
            del state["private"]
        other = prepared(Shardable([0, 1, 2, 3]), 1, 2)
        other.load_state_dict(state)
        assert listed(other) == [[9, 15], [16, 17], [18, 19]]


def test_a_full_stream_left_on_one_rank_is_finished_as_one_stream():
    loader = prepared(Shardable([0, 1, 2, 3]))
    iterator = iter(loader)
    assert [next(iterator).tolist() for _ in range(2)] == [[0, 1], [2, 3]]
    others = [prepared(Shardable([0, 1, 2, 3]), rank, 2, batch_size=4) for rank in range(2)]
    rest = []
    for other in others:
        other.load_state_dict(loader.state_dict())
        rest.append(listed(other))
    assert [first + second for first, second in zip(*rest, strict=True)] == [[*range(4, 12)], [*range(12, 20)]]
    assert listed(others[1]) == [[5, 6, 7, 8], [9, 15, 16, 17], [18, 19, 5, 6]]


def test_another_dataset_length_is_refused_and_nothing_changes():
    loader = prepared(Sized(20))
    next(iter(loader))
    other = prepared(Sized(10))
    with pytest.raises(DataStateError, match="20 samples; this one has 10"):
        other.load_state_dict({**loader.state_dict(), "samples": 2})
    assert listed(other)[0] == [0, 1]


def test_skipping_counts_batches_of_every_rank():
    loader = prepared(Numbers(10), 1, 2)
    assert listed(loader.skipped(1)) == [[6, 7], [0, 1]]


def test_split_batches_needs_a_batch_that_can_be_cut():
    with pytest.raises(ConfigError, match="round multiple"):
        prepared(Numbers(3), 0, 2, batch_size=3, options=LoaderOptions(split_batches=True))
    with pytest.raises(ConfigError, match="needs a batch size"):
        prepared(Numbers(3), 0, 2, batch_size=None, options=LoaderOptions(split_batches=True))


def test_the_user_loader_is_unchanged_and_its_options_are_kept():
    loader = DataLoader(Numbers(3), batch_size=2, timeout=0, drop_last=True, generator=torch.Generator())
    options = LoaderOptions()
    ours = PreparedLoader(open_source(LoaderSpec.of(loader, DataShard(0, 2), options)), options=options)
    assert isinstance(ours, DataLoader)
    assert (ours.batch_size, ours.drop_last, ours.generator) == (2, True, loader.generator)
    assert isinstance(loader.dataset, Numbers)
    assert [batch.tolist() for batch in loader] == [[0, 1]]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_pass_leaves_the_random_state_of_its_process_alone(workers):
    """So that a run which starts one more pass, because it was resumed, draws the same numbers in its model."""
    loader = prepared(Numbers(6), num_workers=workers)
    before = torch.get_rng_state()
    assert len(list(loader)) == 3
    assert torch.get_rng_state().equal(before)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("behind", ["load", "skip"])
def test_a_dispatched_state_saved_before_the_first_batch_is_of_there_and_not_of_what_was_read_ahead(
    rank, world_size, behind
):
    def make():
        loader = DataLoader(WorkerAware(48), batch_size=2, num_workers=2)
        options = LoaderOptions(dispatch_batches=True)
        return prepare_loader(loader, DataShard(rank, world_size), options=options)

    def gate(loader, batches):
        first = next(batches)  # what the pass reads, it reads ahead of it
        states.append(json.loads(json.dumps(loader.state_dict())))
        yield first
        yield from batches

    every, states, loader = listed(make()), [], make()
    loader.load_state_dict(stopped(make(), 3)) if behind == "load" else loader.skip(3)
    loader.gate = gate
    assert listed(loader) == every[3:]
    resumed = make()
    resumed.load_state_dict(states[0])
    assert listed(resumed) == every[3:]


def stopped(loader, steps):
    passing = iter(loader)
    for _ in range(steps):
        next(passing)
    state = loader.state_dict()
    passing.close()
    return state


@pytest.mark.parametrize(("even", "counts"), [(True, (1, 0)), (False, (1, -1))])
def test_a_repeated_batch_that_the_dataset_made_does_not_count(even, counts):
    class Batches(IterableDataset):
        def __iter__(self):
            return iter([torch.tensor([i, i]) for i in range(3)])

    loader = prepared(Batches(), 0, 2, batch_size=None, options=LoaderOptions(even_batches=even))
    seen = [(batch.tolist(), loader.real_counts, loader.batch_rows) for batch in loader]
    assert seen == [([0, 0], None, None), ([2, 2], counts, 1)]

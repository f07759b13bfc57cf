"""The shuffle buffer: an order that is a function of positions, and a resume that is exact and reads little again."""

import json
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from accel_data import LoaderOptions, ShuffleBuffer, prepare_loader
from accel_data.iterable import worker
from accel_data.iterable.capabilities import StreamCapabilities, inspect_stream
from accel_state.errors import ConfigError, DataStateError
from accel_state.parallelism.config import DataShard

pytestmark = pytest.mark.filterwarnings("ignore:every reader of")


class Numbers(IterableDataset):
    """Cannot seek; counts what is read and what is alive."""

    def __init__(self, n):
        self.n, self.reads = n, 0

    def __iter__(self):
        for number in range(self.n):
            self.reads += 1
            yield number


class Seekable(Numbers):
    """Seeks, and orders each epoch by itself."""

    def __init__(self, n):
        super().__init__(n)
        self.epoch, self.at, self.loaded = 0, 0, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        self.at, self.loaded = self.loaded, 0
        while self.at < self.n:
            self.at += 1
            self.reads += 1
            yield self.at - 1 + 1000 * self.epoch

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.loaded = state["at"]


class Files(IterableDataset):
    """Seekable files that are dealt out to ranks and, with ``divides``, to workers."""

    def __init__(self, files, divides=True):
        self.files, self.divides, self.num_shards = files, divides, len(files)
        self.at, self.loaded = 0, 0

    def shard(self, num_shards, index):
        return Files(self.files[index::num_shards], self.divides)

    def __iter__(self):
        info = get_worker_info() if self.divides else None
        mine = self.files if info is None else self.files[info.id :: info.num_workers]
        elements = [element for file in mine for element in file]
        self.at, self.loaded = self.loaded, 0
        while self.at < len(elements):
            self.at += 1
            yield elements[self.at - 1]

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.loaded = state["at"]


def files_of(number, rows):
    return [list(range(file * rows, (file + 1) * rows)) for file in range(number)]


sizes, lengths = st.integers(1, 40), st.integers(0, 200)


@given(lengths, sizes, st.integers(0, 9))
def test_each_epoch_is_a_permutation_that_only_seed_epoch_and_size_decide(n, size, seed):
    buffer = ShuffleBuffer(Numbers(n), size, seed)
    order = list(buffer)
    assert sorted(order) == list(range(n))
    assert list(buffer) == order == list(ShuffleBuffer(Seekable(n), size, seed))
    assert all(abs(place - element) < 2 * size for place, element in enumerate(order))


def test_orders_stay_what_they_were_when_states_of_them_were_saved():
    buffer = ShuffleBuffer(range(20), 5, seed=7)
    assert list(buffer) == [0, 2, 1, 3, 4, 5, 7, 6, 8, 10, 9, 13, 15, 14, 12, 11, 16, 17, 18, 19]
    buffer.set_epoch(1)
    assert list(buffer) == [0, 1, 2, 4, 3, 6, 5, 7, 9, 11, 8, 10, 12, 16, 15, 14, 13, 18, 19, 17]


def test_seeds_epochs_and_sizes_have_other_orders():
    buffer = ShuffleBuffer(Numbers(100), 20)
    orders = [list(buffer), list(ShuffleBuffer(Numbers(100), 20, seed=1)), list(ShuffleBuffer(Numbers(100), 21))]
    buffer.set_epoch(1)
    orders.append(list(buffer))
    assert len({tuple(order) for order in orders}) == 4
    assert list(ShuffleBuffer(Numbers(100), 1)) == list(range(100))


@given(lengths, sizes)
def test_no_more_elements_are_held_than_its_size(n, size):
    source = Numbers(n)
    for delivered, _ in enumerate(ShuffleBuffer(source, size)):
        assert source.reads - delivered <= size


def test_it_shuffles_as_far_as_its_size_and_the_beginning_as_well_as_the_rest():
    """Over 200 epochs: where the elements come from that are delivered at one place."""
    buffer, came = ShuffleBuffer(Numbers(600), 100), {0: [], 300: []}
    for epoch in range(200):
        buffer.set_epoch(epoch)
        order = list(buffer)
        for place, sources in came.items():
            sources.append(order[place] - place)
    assert 75 < max(came[0]) < 100
    assert min(came[300]) < -35
    assert max(came[300]) > 35
    assert abs(sum(came[300])) / 200 < 12
    spread = {place: torch.tensor(sources).double().std() for place, sources in came.items()}
    assert all(20 < value < 40 for value in spread.values())  # uniform over a window of 100: 29


@settings(deadline=None, max_examples=150)
@given(st.data(), lengths, st.integers(1, 80))
def test_a_chain_of_resumes_delivers_the_order_and_reads_at_most_its_size_again(data, n, size):
    source = Seekable(n)
    order, seen, state, furthest = list(ShuffleBuffer(Seekable(n), size)), [], None, 0
    while len(seen) < n:
        buffer = ShuffleBuffer(source, size)
        source.reads = 0
        if state is not None:
            buffer.load_state_dict(state)
            assert buffer.state_dict() == state
            again = furthest - state["source_at"]
            assert again <= size
        elements = iter(buffer)
        steps = data.draw(st.integers(1, n - len(seen)))
        seen += [next(elements) for _ in range(steps)]
        furthest = max(furthest, source.at)
        state = json.loads(json.dumps(buffer.state_dict()))
    assert seen == order


@given(st.integers(1, 120), sizes, st.data())
def test_a_source_that_cannot_seek_is_read_again_from_its_start(n, size, data):
    stop = data.draw(st.integers(0, n))
    order = list(ShuffleBuffer(Numbers(n), size))
    buffer = ShuffleBuffer(Numbers(n), size)
    elements = iter(buffer)
    assert [next(elements) for _ in range(stop)] == order[:stop]
    other = ShuffleBuffer(Numbers(n), size)
    other.load_state_dict(buffer.state_dict())
    assert list(other) == order[stop:]
    assert list(other) == order


@pytest.mark.parametrize("epoch", [0, 1])
def test_a_loaded_position_is_kept_in_its_epoch_only(epoch):
    buffer = ShuffleBuffer(Seekable(60), 10)
    order = list(buffer)
    elements = iter(buffer)
    for _ in range(25):
        next(elements)
    other = ShuffleBuffer(Seekable(60), 10)
    other.load_state_dict(buffer.state_dict())
    other.set_epoch(epoch)
    expected = ShuffleBuffer(Seekable(60), 10)
    expected.set_epoch(1)
    assert list(other) == (list(expected) if epoch else order[25:])


def test_what_was_in_the_buffer_is_in_no_state():
    buffer = ShuffleBuffer(Seekable(1000), 100)
    elements = iter(buffer)
    for _ in range(500):
        next(elements)
    state = buffer.state_dict()
    assert len(json.dumps(state)) < 150
    assert set(state) == {"size", "seed", "epoch", "source", "source_at", "last"}


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [({"size": 0}, "size is 0"), ({"size": 2.5}, "size is 2.5"), ({"size": 3, "seed": "x"}, "seed is 'x'")],
)
def test_impossible_buffers_are_refused(kwargs, words):
    with pytest.raises(ConfigError, match=words):
        ShuffleBuffer(Numbers(3), **kwargs)
    with pytest.raises(ConfigError, match="shuffle=True"):
        ShuffleBuffer(3, 5)


def test_a_state_of_another_order_is_refused_and_changes_nothing():
    buffer = ShuffleBuffer(Numbers(30), 10)
    state = buffer.state_dict()
    for other in (ShuffleBuffer(Numbers(30), 11), ShuffleBuffer(Numbers(30), 10, seed=1)):
        expected = list(other)
        with pytest.raises(DataStateError, match="size 10 and seed 0; this one has size 1"):
            other.load_state_dict(state)
        assert list(other) == expected
    with pytest.raises(DataStateError, match="has no last"):
        buffer.load_state_dict({key: value for key, value in state.items() if key != "last"})


def test_it_can_do_what_its_source_can():
    assert inspect_stream(ShuffleBuffer(Numbers(3), 2)) == StreamCapabilities(seekable=True)
    assert inspect_stream(ShuffleBuffer(Files([[1], [2]]), 2)) == StreamCapabilities(True, 2, None, True)
    marked = Numbers(3)
    marked.already_sharded = True
    assert inspect_stream(ShuffleBuffer(marked, 2)).presharded is not None
    with pytest.raises(TypeError):
        len(ShuffleBuffer(Numbers(3), 2))
    assert len(ShuffleBuffer([1, 2, 3], 2)) == 3
    first, second = (ShuffleBuffer(Files(files_of(2, 30)), 20).shard(num_shards=2, index=i) for i in range(2))
    assert [element + 30 for element in first] != list(second)


def test_it_goes_to_another_process_without_its_iterator():
    buffer = ShuffleBuffer(Numbers(30), 10)
    order = list(buffer)
    next(iter(buffer))
    assert list(pickle.loads(pickle.dumps(buffer))) == order


def prepared(dataset, rank=0, ranks=1, *, even=True, **kwargs):
    options = LoaderOptions(dispatch_batches=False, even_batches=even)
    loader = DataLoader(dataset, **({"batch_size": 2} | kwargs))
    return prepare_loader(loader, DataShard(rank, ranks), options=options)


def listed(loader):
    return [batch.tolist() for batch in loader]


def make_one_stream():
    return Seekable(60)


def make_worker_streams():
    files = Files(files_of(8, 9))
    files.shard = None
    return files


def make_shards():
    return Files(files_of(8, 9), divides=False)


def make_shards_of_workers():
    return Files(files_of(8, 9))


SOURCES = [make_one_stream, make_worker_streams, make_shards, make_shards_of_workers]


def check_resumes(rank, ranks, make, workers, steps):
    """From inside any of two epochs, bit for bit, to the end of the third."""

    def loader_of():
        return prepared(ShuffleBuffer(make(), 16, seed=3), rank, ranks, num_workers=workers)

    loader = loader_of()
    epochs = [listed(loader) for _ in range(3)]
    assert epochs[0] != epochs[1]
    for epoch in range(2):
        stopped = loader_of()
        stopped.set_epoch(epoch)
        passing = iter(stopped)
        assert [next(passing).tolist() for _ in range(steps)] == epochs[epoch][:steps]
        state = json.loads(json.dumps(stopped.state_dict()))
        passing.close()
        resumed = loader_of()
        resumed.load_state_dict(state)
        assert listed(resumed) == epochs[epoch][steps:]
        assert listed(resumed) == epochs[epoch + 1]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.parametrize("make", SOURCES)
def test_a_prepared_loader_resumes_exactly_inside_an_epoch_and_across_epochs(make, workers):
    check_resumes(0, 1, make, workers, steps=7)


@pytest.mark.sampled(1)
@pytest.mark.ranks(2)
@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.parametrize("make", SOURCES)
def test_two_ranks_resume_exactly_inside_an_epoch_and_across_epochs(rank, world_size, make, workers):
    check_resumes(rank, world_size, make, workers, steps=5)


@pytest.mark.parametrize("make", SOURCES)
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.sampled(2)
def test_two_ranks_together_deliver_every_element_once(make, workers):
    got = []
    for rank in range(2):
        for batch in (loader := prepared(ShuffleBuffer(make(), 16), rank, 2, even=False, num_workers=workers)):
            counts = loader.real_counts
            got += batch.tolist() if counts is None else batch.tolist()[: max(counts[rank], 0)]
    assert sorted(got) == list(range(60 if make is make_one_stream else 72))


@pytest.mark.parametrize(("ranks", "workers"), [(3, 0), (1, 2), (1, 0)])
@pytest.mark.parametrize("make", [make_shards, make_shards_of_workers])
def test_other_readers_go_on_from_two_ranks_and_lose_nothing(make, ranks, workers):
    seen, state = [], None
    for rank in range(2):
        loader = prepared(ShuffleBuffer(make(), 16), rank, 2, even=False)
        passing = iter(loader)
        seen += [element for _ in range(6) for element in next(passing).tolist()]
        state = state or json.loads(json.dumps({**loader.state_dict(), "private": None}))
    for rank in range(ranks):
        loader = prepared(ShuffleBuffer(make(), 16), rank, ranks, even=False, num_workers=workers)
        loader.load_state_dict(state)
        for batch in loader:
            counts = loader.real_counts
            seen += batch.tolist() if counts is None else batch.tolist()[: max(counts[rank], 0)]
    assert sorted(seen) == list(range(72))


def test_a_resumed_loader_does_not_read_the_stream_from_its_start(monkeypatch):
    monkeypatch.setattr(worker, "_SNAPSHOT_SHARE", float("inf"))  # however slow the machine is just now
    loader = prepared(ShuffleBuffer(Seekable(5000), 100))
    passing = iter(loader)
    for _ in range(2000):
        next(passing)
    source = Seekable(5000)
    resumed = prepared(ShuffleBuffer(source, 100))
    resumed.load_state_dict(json.loads(json.dumps(loader.state_dict())))
    rest = iter(resumed)
    assert next(rest).tolist() == next(passing).tolist()
    assert source.reads <= 110


def test_other_seeds_in_a_resumed_run_are_refused_by_the_loader():
    loader = prepared(ShuffleBuffer(Seekable(100), 10))
    passing = iter(loader)
    next(passing)
    other = prepared(ShuffleBuffer(Seekable(100), 10, seed=5))
    other.load_state_dict(loader.state_dict())
    with pytest.raises(DataStateError, match="seed 0; this one has size 10 and seed 5"):
        next(iter(other))


def test_with_torchdatas_loader_it_keeps_its_place():
    stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader

    def make():
        return stateful(ShuffleBuffer(Seekable(50), 12), batch_size=4)

    every, loader = [batch.tolist() for batch in make()], make()
    passing = iter(loader)
    assert [next(passing).tolist() for _ in range(5)] == every[:5]
    other = make()
    other.load_state_dict(loader.state_dict())
    assert [batch.tolist() for batch in other] == every[5:]


class Independent(Seekable):
    """Any number of its iterators may be read in turn; its state follows the one that was made last."""

    def __iter__(self):
        counted, self.loaded = [self.loaded], 0
        self.latest = counted
        while counted[0] < self.n:
            counted[0] += 1
            yield counted[0] - 1

    def state_dict(self):
        return {"at": self.latest[0]}


@pytest.mark.parametrize("size", [1, 16])
@pytest.mark.parametrize("shuffles", [True, False])
def test_a_pass_inside_a_pass_leaves_the_states_of_the_outer_one_right(monkeypatch, shuffles, size):
    monkeypatch.setattr(worker, "_SNAPSHOT_SHARE", float("inf"))

    def make():
        return prepared(ShuffleBuffer(Independent(200), size) if shuffles else Independent(200))

    every = listed(make())
    loader = make()
    passing = iter(loader)
    got = [next(passing).tolist() for _ in range(30)]
    for _, _ in zip(range(3), loader, strict=False):
        pass
    got += [next(passing).tolist() for _ in range(20)]
    resumed = make()
    resumed.load_state_dict(json.loads(json.dumps(loader.state_dict())))
    assert got + listed(resumed) == every

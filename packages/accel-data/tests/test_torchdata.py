"""With the real torchdata: loaders of its class, given by the user or asked for, keep their place."""

import json

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from accel_data import LoaderOptions, prepare_loader
from accel_state.errors import ConfigError
from accel_state.parallelism.config import DataShard

stateful_dataloader = pytest.importorskip("torchdata.stateful_dataloader")
StatefulDataLoader = stateful_dataloader.StatefulDataLoader
pytestmark = [
    pytest.mark.filterwarnings("ignore:every reader of"),
    pytest.mark.filterwarnings("ignore:.*set_vital"),
    pytest.mark.filterwarnings("ignore:.*pin_memory"),
]
ASKED = LoaderOptions(use_stateful_dataloader=True, dispatch_batches=False, data_seed=1)


class Walk(IterableDataset):
    """A random walk: what comes next only its state tells. Each worker walks its own."""

    def __init__(self, length):
        self.length, self.place = length, [0, 0]

    def __iter__(self):
        info = get_worker_info()
        if self.place[0] == 0:
            self.place = [0, 1000 * (info.id if info else 0)]
        while self.place[0] < self.length:
            steps, at = self.place
            self.place = [steps + 1, (at * 7 + steps) % 997 + at // 1000 * 1000]
            yield at
        self.place = [0, 0]

    def state_dict(self):
        return {"place": list(self.place)}

    def load_state_dict(self, state):
        self.place = list(state["place"])


def prepared(loader, rank=0, ranks=1, options=ASKED):
    return prepare_loader(loader, DataShard(rank, ranks), options=options)


def listed(loader):
    return [batch.tolist() for batch in loader]


def stopped(loader, steps):
    passing = iter(loader)
    delivered = [next(passing).tolist() for _ in range(steps)]
    state = json.loads(json.dumps(loader.state_dict()))
    passing.close()
    return delivered, state


def test_the_option_gives_a_loader_of_torchdatas_class_and_the_same_batches():
    loader = prepared(DataLoader(Walk(7), batch_size=2))
    assert isinstance(loader, StatefulDataLoader)
    assert loader.snapshot_every_n_steps == 1
    assert listed(loader) == listed(DataLoader(Walk(7), batch_size=2))
    assert listed(loader) == listed(StatefulDataLoader(Walk(7), batch_size=2))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("steps", [0, 2, 3])
def test_a_state_after_some_batches_goes_on_with_the_next_as_torchdatas_own_does(workers, steps):
    whole = listed(StatefulDataLoader(Walk(7), batch_size=2, num_workers=workers))
    for make in (DataLoader, StatefulDataLoader):
        delivered, state = stopped(prepared(make(Walk(7), batch_size=2, num_workers=workers)), steps)
        resumed = prepared(make(Walk(7), batch_size=2, num_workers=workers))
        resumed.load_state_dict(state)
        assert delivered + listed(resumed) == whole
        assert listed(resumed) == whole


def test_the_state_of_each_worker_is_noted_after_every_batch_or_as_often_as_asked():
    def snapshots(**kwargs):
        _, state = stopped(prepared(StatefulDataLoader(Walk(20), batch_size=2, num_workers=2, **kwargs)), 8)
        return [at for at, _ in state["private"]["snapshots"]]

    assert snapshots() == [8, 8]
    assert snapshots(snapshot_every_n_steps=3) == [6, 6]


@pytest.mark.parametrize("persistent", [False, True])
def test_no_worker_outlives_a_pass_unless_it_is_meant_to(persistent):
    loader = prepared(StatefulDataLoader(Walk(7), batch_size=2, num_workers=1, persistent_workers=persistent))
    first = listed(loader)
    assert (loader._source._pool._inner._iterator is not None) == persistent
    assert listed(loader) == first


@pytest.mark.sampled(1)
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("shuffle", [False, True])
def test_map_style_data_in_a_stateful_loader_has_an_order_and_resumes_on_other_ranks(workers, shuffle):
    def make(rank, ranks, batch_size):
        loader = StatefulDataLoader(range(24), batch_size=batch_size, shuffle=shuffle, num_workers=workers)
        return prepared(loader, rank, ranks)

    loader = make(0, 1, 4)
    whole = [index for batch in listed(loader) for index in batch]
    assert sorted(whole) == list(range(24))
    assert (whole != list(range(24))) == shuffle
    delivered, state = stopped(make(0, 1, 4), 2)
    assert state["source"]["order"]["kind"] == ("shuffled" if shuffle else "sequential")
    rest = []
    for rank in range(2):
        other = make(rank, 2, 2)
        other.load_state_dict(state)
        rest.append(listed(other))
    assert [i for batch in delivered for i in batch] + [
        i for pair in zip(*rest, strict=True) for b in pair for i in b
    ] == whole


def test_torchdatas_distributed_sampler_is_not_sharded_twice():
    sampler = stateful_dataloader.sampler.StatefulDistributedSampler(range(12), 2, 0, shuffle=False)
    loader = prepared(StatefulDataLoader(range(12), batch_size=3, sampler=sampler), 1, 2)
    assert listed(loader) == [[3, 4, 5], [9, 10, 11]]


def test_a_loader_of_a_class_of_its_own_is_refused_with_what_works():
    class Mine(DataLoader):
        pass

    with pytest.raises(ConfigError, match="derive that class from torchdata's StatefulDataLoader"):
        prepared(Mine(Walk(3)))
    assert isinstance(prepared(Mine(torch.arange(3))), Mine)

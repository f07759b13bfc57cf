"""``allow_changed_data``: a position inside an epoch of a dataset that has grown, shrunk or changed since."""

import json
import warnings
from itertools import chain

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, RandomSampler, WeightedRandomSampler

from accel_data import LengthGrouped, LoaderOptions, OrderSampler, prepare_loader, skip_first_batches
from accel_state.errors import DataStateError
from accel_state.parallelism.config import DataShard

OLD, STEPS, BATCH = 24, 2, 4
ALLOWED = LoaderOptions(data_seed=3, allow_changed_data=True)


class Walked:
    def __init__(self, size):
        self.size = size

    def __iter__(self):
        return iter(torch.randperm(self.size).tolist())

    def __len__(self):
        return self.size


SAMPLING = {
    "sequential": lambda size: {},
    "shuffled": lambda size: {"shuffle": True},
    "replacement": lambda size: {"sampler": RandomSampler(range(size), replacement=True)},
    "weighted": lambda size: {"sampler": WeightedRandomSampler(torch.ones(size), size)},
    "length grouped": lambda size: {"sampler": OrderSampler(LengthGrouped(range(size), group_size=4))},
    "walked": lambda size: {"sampler": Walked(size)},
}


def loader_of(size, sampling="shuffled", *, rank=0, ranks=1, options=ALLOWED, **kwargs):
    loader = DataLoader(range(size), BATCH, collate_fn=list, **SAMPLING[sampling](size), **kwargs)
    return prepare_loader(loader, DataShard(rank, ranks), options=options)


def flat(batches):
    return list(chain.from_iterable(batches))


def saved(sampling="shuffled", size=OLD, steps=STEPS, loader=None):
    """What was delivered and the state then; what an uninterrupted run goes on with."""
    loader = loader or loader_of(size, sampling)
    passing = iter(loader)
    delivered = flat(next(passing) for _ in range(steps))
    return delivered, json.loads(json.dumps(loader.state_dict())), flat(passing)


def loaded(loader, state, told):
    with pytest.warns(RuntimeWarning, match=told):
        loader.load_state_dict(state)
    return loader


GROWN = (
    "24 samples, this one has 30; epoch 0 is finished over the 24 that it began with, of which 16 are left to "
    "deliver; the 6 new ones come from epoch 1 on"
)


@pytest.mark.parametrize("sampling", ["sequential", "shuffled", "replacement"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_grown_dataset_finishes_the_epoch_it_began_and_adds_the_new_samples_to_the_next(sampling, ranks):
    delivered, state, rest = saved(sampling)
    loaders = [loader_of(30, sampling, rank=rank, ranks=ranks) for rank in range(ranks)]
    loaded(loaders[0], state, GROWN)
    for other in loaders[1:]:
        other.load_state_dict(state)  # of the ranks the first one warns
    assert len(loaders[0]) == OLD // BATCH // ranks
    assert flat(flat(step) for step in zip(*loaders, strict=True)) == rest
    second = [list(loader) for loader in loaders]
    assert max(chain(*chain(*second))) >= OLD
    if sampling != "replacement":
        assert set(chain(*chain(*second))) == set(range(30))
        assert sorted(delivered + rest) == list(range(OLD))
    assert loaders[0].epoch == 2


def test_a_run_over_a_grown_dataset_is_saved_and_resumed_inside_the_epoch_without_being_asked_again():
    _, state, rest = saved()
    loader = loaded(loader_of(30), state, GROWN)
    plain = LoaderOptions(data_seed=3)
    for steps in (0, 1, 2):
        passing = iter(loader)
        got = flat(next(passing) for _ in range(steps))
        state = json.loads(json.dumps(loader.state_dict()))
        passing.close()
        resumed = loader_of(30, options=plain)
        resumed.load_state_dict(state)
        assert flat(resumed) == rest[len(got) :]
        assert sorted(flat(resumed)) == list(range(30))
        loader = loader_of(30, options=plain)
        loader.load_state_dict(state)
        rest = rest[len(got) :]
    assert len(rest) == BATCH


def test_a_run_over_a_grown_dataset_skips_and_ends_as_any_other():
    _, state, rest = saved()
    loader = loaded(loader_of(30), state, GROWN)
    loader.skip(1)
    assert flat(loader) == rest[BATCH:]
    again = loaded(loader_of(30), state, GROWN)
    for _ in again:
        last = again.end_of_dataloader, json.loads(json.dumps(again.state_dict()))
    assert last[0]
    third = loader_of(30)
    third.load_state_dict(last[1])
    assert (third.epoch, sorted(flat(third))) == (1, list(range(30)))
    assert sorted(flat(skip_first_batches(loader_of(30), 0))) == list(range(30))


def test_a_shrunk_dataset_read_in_sequence_keeps_its_position():
    delivered, state, _ = saved("sequential")
    loader = loaded(
        loader_of(18, "sequential"), state, "24 samples, this one has 18; position 8 of epoch 0 is kept, and 10"
    )
    assert delivered + flat(loader) == list(range(18))
    assert flat(loader) == list(range(18))


ANEW = "epoch 0 begins anew: the 8 that were delivered of it may come again"


@pytest.mark.parametrize(
    ("sampling", "size"),
    [("shuffled", 18), ("sequential", 6), ("weighted", 30), ("length grouped", 30), ("walked", 30), ("walked", 18)],
)
def test_an_epoch_of_which_the_rest_cannot_be_known_begins_anew(sampling, size):
    _, state, _ = saved(sampling)
    loader = loaded(loader_of(size, sampling), state, ANEW)
    assert (loader.position.epoch, loader.position.samples) == (0, 0)
    fresh = loader_of(size, sampling)
    again = loader_of(size, sampling)
    again.load_state_dict(json.loads(json.dumps(loader.state_dict())))
    expected = flat(fresh)
    assert flat(loader) == flat(again) == expected
    assert len(expected) == size


class Named(Dataset):
    def __init__(self, fingerprint):
        self.fingerprint = fingerprint

    def __len__(self):
        return OLD

    def __getitem__(self, index):
        return index


def test_other_data_of_the_same_length_keep_the_position():
    first, second = (
        prepare_loader(DataLoader(Named(name), BATCH, shuffle=True, collate_fn=list), DataShard(), options=ALLOWED)
        for name in "ab"
    )
    _, state, rest = saved(loader=first)
    assert flat(loaded(second, state, "'a', this one has 'b'; position 8 of epoch 0 is kept")) == rest


def test_one_load_may_be_allowed_or_refused_whatever_the_options_say():
    _, state, rest = saved()
    strict = loader_of(30, options=LoaderOptions(data_seed=3))
    with pytest.raises(DataStateError, match="or load with allow_changed_data=True"):
        strict.load_state_dict(state)
    with pytest.warns(RuntimeWarning, match="is finished over the 24"):
        strict.load_state_dict(state, allow_changed_data=True)
    assert flat(strict) == rest
    with pytest.raises(DataStateError, match="this one has 30"):
        loader_of(30).load_state_dict(state, allow_changed_data=False)


def test_another_kind_of_order_is_refused_all_the_same():
    _, state, _ = saved("shuffled")
    loader = loader_of(30, "sequential")
    with pytest.raises(DataStateError, match="this one has 30"):
        loader.load_state_dict(state)
    assert flat(loader) == list(range(30))


@pytest.mark.parametrize("steps", [0, 2])
def test_unchanged_data_are_loaded_without_a_word(steps):
    _, state, rest = saved(steps=steps)
    loader = loader_of(OLD)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loader.load_state_dict(state)
    assert flat(loader) == rest


def test_a_load_that_is_undone_leaves_nothing_behind():
    _, state, _ = saved()
    loader = loader_of(30)
    undo = loader.undo()
    loaded(loader, state, GROWN)
    undo()
    assert sorted(flat(loader)) == list(range(30))


class ByEpoch(Dataset):
    """Has another length in each epoch, from when it is told of it."""

    def __init__(self, lengths):
        self.lengths, self.epoch = lengths, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return self.lengths[self.epoch]

    def __getitem__(self, index):
        return range(len(self))[index]


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("lengths", [(8, 12, 9), (12, 8, 8)], ids=["grows", "shrinks"])
def test_a_dataset_that_changes_its_length_when_its_epoch_begins_is_read_in_full(lengths, shuffle):
    loader = DataLoader(ByEpoch(lengths), BATCH, shuffle=shuffle, collate_fn=list)
    ranks = [prepare_loader(loader, DataShard(rank, 2), options=LoaderOptions(data_seed=3)) for rank in range(2)]
    for length in lengths:
        assert {*flat(ranks[0]), *flat(ranks[1])} == set(range(length))

"""Datasets that keep their own position, read in the loop's process: a pass that is left loses nothing for the next."""

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from accel_data import LoaderOptions, prepare_loader
from accel_state.errors import DataStateError
from accel_state.parallelism.config import DataShard

pytestmark = pytest.mark.filterwarnings("ignore:every reader of")
STOPS = (2, 1, 3, 99)


class GoesOn(IterableDataset):
    """Begins where it stands, as torch's loader lets it."""

    def __init__(self, length=40):
        self.length, self.place = length, {"at": 0}

    def __iter__(self):
        while self.place["at"] < self.length:
            self.place["at"] += 1
            yield self.place["at"] - 1
        self.place["at"] = 0

    def state_dict(self):
        return self.place  # which it goes on to change

    def load_state_dict(self, state):
        self.place = state


class OwnIterator(GoesOn):
    def __iter__(self):
        return self

    def __next__(self):
        at = self.place["at"]
        self.place = {"at": 0 if at == self.length else at + 1}
        if at == self.length:
            raise StopIteration
        return at


class BeginsAgain(GoesOn):
    """Begins at the front, except behind a state that was loaded."""

    start = 0

    def __iter__(self):
        start, self.start = self.start, 0
        for at in range(start, self.length):
            self.place = {"at": at + 1}
            yield at

    def load_state_dict(self, state):
        self.place, self.start = state, state["at"]


class SaysNothing(OwnIterator):
    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


def prepared(dataset, rank=0, ranks=1, *, dispatched=False):
    options = LoaderOptions(dispatch_batches=dispatched)
    return prepare_loader(DataLoader(dataset, batch_size=2), DataShard(rank, ranks), options=options)


def passes(loader):
    """The batches of passes that are left after so many steps, and the state behind each."""
    found, states = [], []
    for stop in STOPS:
        found.append([])
        for batch in loader:
            found[-1].append(batch.tolist())
            if len(found[-1]) == stop:
                break
        states.append(loader.state_dict())
    return found, states


def check_passes(kind, rank=0, ranks=1, *, dispatched=False):
    plain, _ = passes(DataLoaderOfGroups(kind(), rank, ranks))
    loader = prepared(dataset := kind(), rank, ranks, dispatched=dispatched)
    found, states = passes(loader)
    assert found == plain
    for state, read in zip(states[:-1], found, strict=False):
        for again in (dataset, kind()):
            resumed = prepared(again, rank, ranks, dispatched=dispatched)
            resumed.load_state_dict(state)
            assert next(iter(resumed)).tolist() == [at + 2 * ranks for at in read[-1]]


class DataLoaderOfGroups:
    """torch's loader, of which each rank keeps its batch of every group: what passes deliver without lookahead."""

    def __init__(self, dataset, rank, ranks):
        self.loader, self.rank = DataLoader(dataset, batch_size=2 * ranks), rank

    def __iter__(self):
        return (group[2 * self.rank : 2 * self.rank + 2] for group in self.loader)

    def state_dict(self):
        return {}


KINDS = [GoesOn, OwnIterator, BeginsAgain]


@pytest.mark.parametrize("dispatched", [False, True], ids=["alone", "dispatched"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_pass_after_a_break_begins_where_torchs_does(kind, dispatched):
    check_passes(kind, dispatched=dispatched)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dispatched", [False, True], ids=["strided", "dispatched"])
def test_ranks_lose_nothing_that_they_had_read_ahead(rank, dispatched):
    for kind in KINDS:
        check_passes(kind, rank, 2, dispatched=dispatched)


def test_what_moves_back_draws_nothing_from_the_loops_generators():
    class Draws(OwnIterator):
        def __next__(self):
            return super().__next__() + 0 * int(torch.randint(9, ()))

    loader = prepared(Draws())
    passing = iter(loader)
    next(passing)
    before = torch.random.get_rng_state()
    passing.close()
    assert torch.equal(torch.random.get_rng_state(), before)


def test_a_state_that_does_not_load_is_a_warning_with_numbers():
    class Refuses(GoesOn):
        def load_state_dict(self, state):
            raise DataStateError("not mine")

    loader = prepared(Refuses())
    passing = iter(loader)
    next(passing)
    with pytest.warns(RuntimeWarning, match=r"left after 2 elements, and 2 more .*lacks these 2 elements"):
        passing.close()


def test_a_state_that_is_no_position_moves_nothing():
    dataset = SaysNothing()
    passing = iter(prepared(dataset))
    next(passing)
    passing.close()
    assert dataset.place == {"at": 4}

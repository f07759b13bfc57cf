"""A ``__len__`` that is wrong loses no sample, repeats none, and leaves the end of an epoch known."""

import json
from itertools import zip_longest

import pytest
from torch.utils.data import DataLoader, IterableDataset

from accel_data import LoaderOptions, prepare_loader
from accel_state.parallelism.config import DataShard

SIZE, BATCH = 22, 2
pytestmark = [
    pytest.mark.filterwarnings("ignore:every reader of"),
    pytest.mark.filterwarnings("ignore:Length of IterableDataset"),
]


class Claiming:
    """Says that it has ``claimed`` items, and has others."""

    def __init__(self, claimed, items):
        self.claimed, self.items = claimed, items

    def __iter__(self):
        return iter(self.items)

    def __len__(self):
        return self.claimed


class ClaimingStream(Claiming, IterableDataset):
    pass


BATCHES = [list(range(first, first + BATCH)) for first in range(0, SIZE, BATCH)]


def sampler(claimed):
    return {"dataset": range(SIZE), "batch_size": BATCH, "sampler": Claiming(claimed, range(SIZE))}


def batch_sampler(claimed):
    return {"dataset": range(SIZE), "batch_sampler": Claiming(claimed // BATCH, BATCHES)}


def stream(claimed):
    return {"dataset": ClaimingStream(claimed, range(SIZE)), "batch_size": BATCH}


def loaders(kind, claimed, ranks, workers):
    return [
        prepare_loader(
            DataLoader(**kind(claimed), collate_fn=list, num_workers=workers),
            DataShard(rank, ranks),
            options=LoaderOptions(data_seed=1),
        )
        for rank in range(ranks)
    ]


def delivered(group, stop=None):
    """The real rows of the next steps, with what the loaders say of their end."""
    rows, last = [], []
    for number, batches in enumerate(zip_longest(*group), 1):
        counts = group[0].real_counts or [len(batch) for batch in batches]
        rows += [row for batch, count in zip(batches, counts, strict=True) for row in (batch or ())[: max(count, 0)]]
        last.append(group[0].end_of_dataloader)
        left = group[0].batches_left
        assert left is None or left >= 0
        assert (left == 0) == last[-1]
        if number == stop:
            break
    return rows, last


@pytest.mark.parametrize("kind", [sampler, batch_sampler, stream])
@pytest.mark.parametrize("claimed", [0, 2, 10, 20, 30, 100])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_every_sample_comes_once_and_the_end_is_known(kind, claimed, ranks):
    group = loaders(kind, claimed, ranks, 0)
    for epoch in range(2):
        assert {loader.epoch for loader in group} == {epoch}
        rows, last = delivered(group)
        assert rows == list(range(SIZE))
        assert last == [False] * (len(last) - 1) + [True]


@pytest.mark.parametrize("kind", [sampler, batch_sampler, stream])
@pytest.mark.parametrize("claimed", [10, 30])
@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_run_is_resumed_behind_where_the_length_says_that_it_ends(kind, claimed, workers):
    group = loaders(kind, claimed, 1, workers)
    passing = iter(group[0])
    rows = [row for _ in range(8) for row in next(passing)]
    state = json.loads(json.dumps(group[0].state_dict()))
    passing.close()
    resumed = loaders(kind, claimed, 1, workers)
    resumed[0].load_state_dict(state)
    rest, last = delivered(resumed)
    assert rows + rest == list(range(SIZE))
    assert last == [False, False, True]

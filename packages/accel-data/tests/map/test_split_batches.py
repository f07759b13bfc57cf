"""Batches of a user's batch sampler that are split over ranks: nothing is lost, and the ranks stay in step."""

from itertools import zip_longest

import pytest
from torch.utils.data import DataLoader

from accel_data import LoaderOptions, prepare_loader, skip_first_batches
from accel_state.parallelism.config import DataShard

SIZE, BATCH, RANKS = 40, 8, 4


class Batches:
    """Consecutive indices in batches of the given sizes, then of ``BATCH``."""

    batch_size, drop_last = BATCH, False

    def __init__(self, *sizes):
        self.sizes = sizes

    def __iter__(self):
        first, sizes = 0, iter(self.sizes)
        while first < SIZE:
            after = min(first + next(sizes, BATCH), SIZE)
            yield list(range(first, after))
            first = after

    def __len__(self):
        return sum(1 for _ in self)


def loaders(*sizes, even, **kwargs):
    options = LoaderOptions(split_batches=True, even_batches=even, data_seed=1)
    return [
        prepare_loader(
            DataLoader(range(SIZE), batch_sampler=Batches(*sizes), collate_fn=list, **kwargs),
            DataShard(rank, RANKS),
            options=options,
        )
        for rank in range(RANKS)
    ]


def steps_of(ranks):
    """By step, what each rank has: its real rows, or None; the ranks agree on all but their rows."""
    found = []
    for batches in zip_longest(*ranks):
        (counts,) = {loader.real_counts for loader, batch in zip(ranks, batches, strict=True) if batch is not None}
        assert [batch is None for batch in batches] == [count < 0 for count in counts]
        found.append(
            [batch[:count] if batch is not None else None for batch, count in zip(batches, counts, strict=True)]
        )
    return found


def rows(steps):
    return [row for step in steps for part in step for row in part or []]


@pytest.mark.parametrize("even", [False, True])
@pytest.mark.parametrize("start", [1, 5, 7, 8, 30, 33, 39])
def test_ranks_that_go_on_inside_a_batch_stay_in_step(start, even):
    ranks = loaders(even=even)
    for loader in ranks:
        loader.load_state_dict({**loader.state_dict(), "samples": start})
    steps = steps_of(ranks)
    assert rows(steps) == list(range(start, SIZE))
    assert all(part is not None for step in steps[:-1] for part in step)
    lengths = {tuple(len(part or ()) for part in step) for step in steps[1:-1]}
    assert lengths <= {(2, 2, 2, 2)}


@pytest.mark.parametrize("even", [False, True])
@pytest.mark.parametrize("sizes", [(5,), (8, 3, 8, 2, 1, 1), (11, 8), (8, 8, 8, 11, 2), (8, 8, 8, 8, 5, 3), (39, 1)])
def test_batches_of_other_sizes_than_the_sampler_promises_lose_nothing(sizes, even):
    ranks = loaders(*sizes, even=even)
    steps = steps_of(ranks)
    assert rows(steps) == list(range(SIZE))
    assert all(part is not None for step in steps[:-1] for part in step)
    for loader in ranks:
        assert loader.epoch == 1


@pytest.mark.parametrize("even", [False, True])
@pytest.mark.parametrize("sizes", [(5,), (1, 8, 8), (8, 3, 8, 2, 1, 1), (8, 8, 8, 8, 5, 3)])
@pytest.mark.parametrize("skip", [1, 2, 3])
def test_as_many_steps_are_skipped_as_a_pass_has(sizes, skip, even):
    whole = steps_of(loaders(*sizes, even=even))
    skipped = [skip_first_batches(loader, skip) for loader in loaders(*sizes, even=even)]
    assert steps_of(skipped) == whole[skip:]


def test_no_batch_is_skipped_inside_a_batch():
    (loader, *_) = loaders(even=True)
    loader.load_state_dict({**loader.state_dict(), "samples": 3})
    loader.skip(0)
    assert loader.position.samples == 3
    loader.skip(1)
    assert loader.position.samples == 8

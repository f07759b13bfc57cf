"""Shards of batches for each process."""

import pytest
from torch.utils.data import BatchSampler

from accel_compat.data.samplers import CompatBatchShard


def _shards(count, size, *, even=True, split=False, drop_last=False):
    sampler = BatchSampler(range(count), batch_size=size, drop_last=drop_last)
    return [list(CompatBatchShard(sampler, 2, rank, split_batches=split, even_batches=even)) for rank in (0, 1)]


def test_batches_take_turns():
    assert _shards(12, 3) == [[[0, 1, 2], [6, 7, 8]], [[3, 4, 5], [9, 10, 11]]]


def test_the_last_batches_are_filled_up_with_the_first_samples():
    assert _shards(8, 3) == [[[0, 1, 2], [6, 7, 0]], [[3, 4, 5], [1, 2, 3]]]


def test_uneven_batches_are_left_as_they_are():
    assert _shards(8, 3, even=False) == [[[0, 1, 2], [6, 7]], [[3, 4, 5]]]


def test_an_incomplete_group_is_dropped():
    assert _shards(8, 3, drop_last=True) == [[[0, 1, 2]], [[3, 4, 5]]]


class Buckets(BatchSampler):
    """Batches of two samples at most, with a short one wherever a bucket ends."""

    def __init__(self, *sizes):
        self.sizes, self.batch_size, self.drop_last = sizes, 2, False

    def __iter__(self):
        samples = iter(range(sum(self.sizes)))
        return iter([[next(samples) for _ in range(size)] for size in self.sizes])

    def __len__(self):
        return len(self.sizes)


@pytest.mark.parametrize("even", [True, False])
def test_batches_take_turns_behind_a_short_one(even):
    ranks = [list(CompatBatchShard(Buckets(2, 1, 2, 2, 1, 2), 2, rank, even_batches=even)) for rank in (0, 1)]
    assert ranks == [[[0, 1], [3, 4], [7]], [[2], [5, 6], [8, 9]]]


def test_each_short_batch_of_the_last_group_is_filled_up():
    ranks = [list(CompatBatchShard(Buckets(2, 2, 2, 2, 1, 1), 3, rank)) for rank in (0, 1, 2)]
    assert ranks == [[[0, 1], [6, 7]], [[2, 3], [8, 0]], [[4, 5], [9, 1]]]


def test_split_batches_are_divided():
    assert _shards(8, 4, split=True) == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]


def test_a_batch_that_cannot_be_divided_is_refused():
    with pytest.raises(ValueError, match="round multiple"):
        _shards(9, 3, split=True)

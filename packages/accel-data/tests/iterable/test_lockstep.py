"""Ranks with streams of different lengths take equally many steps, and know what in them is real."""

import faulthandler
import gc
import sys

import pytest
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset

from accel_data.options import LoaderOptions
from accel_data.prepare import prepare_loader
from accel_state.errors import CollectiveError, DataError
from accel_state.parallelism.config import DataShard

OPTIONS = LoaderOptions(dispatch_batches=False)


class Files(IterableDataset):
    """Files of different lengths that can be dealt out."""

    def __init__(self, files):
        self.files = files
        self.num_shards = len(files)

    def shard(self, num_shards, index):
        return Files(self.files[index::num_shards])

    def __iter__(self):
        return (element for file in self.files for element in file)


UNEVEN = [[0, 1, 2, 3, 4], [10, 11, 12, 13, 14, 15, 16, 17]]


def prepared(rank, files=UNEVEN, options=OPTIONS, **kwargs):
    loader = DataLoader(Files(files), batch_size=2, **kwargs)
    return prepare_loader(loader, DataShard(rank, 2), options=options)


def listed(loader):
    return [batch.tolist() for batch in loader]


def gathered(value):
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


@pytest.mark.ranks(2)
@pytest.mark.parametrize("workers", [0, 2])
def test_the_shorter_stream_is_filled_up_and_said_to_be(rank, workers):
    loader = prepared(rank, num_workers=workers)
    for _ in range(2):
        got, counts = [], []
        for batch in loader:
            got.append(batch.tolist())
            counts.append(loader.real_counts)
        expected = [[[0, 1], [2, 3], [4, 0], [0, 1]], [[10, 11], [12, 13], [14, 15], [16, 17]]]
        assert got == expected[rank]
        assert counts == [None, None, (1, 2), (0, 2)]
        assert (loader.end_of_dataloader, loader.remainder) == (True, 2)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("steps", [1, 2, 3])
def test_a_resume_behind_the_end_of_one_stream_goes_on(rank, steps):
    loader = prepared(rank)
    iterator = iter(loader)
    for _ in range(steps):
        next(iterator)
    state = loader.state_dict()
    iterator.close()
    assert state["samples"] == [0, 4, 8, 11][steps]
    assert len({str({**one, "private": None}) for one in gathered(state)}) == 1
    other = prepared(rank)
    other.load_state_dict(state)
    rest = []
    for batch in other:
        counts = other.real_counts
        rest.append(batch.tolist()[: 2 if counts is None else counts[rank]])
    expected = [[[0, 1], [2, 3], [4], []], [[10, 11], [12, 13], [14, 15], [16, 17]]]
    assert rest == expected[rank][steps:]


@pytest.mark.ranks(2)
def test_leaving_the_loop_together_leaves_nothing_under_way(rank):
    loader = prepared(rank)
    for _ in loader:
        break
    assert len(listed(loader)) == 4


@pytest.mark.ranks(2)
def test_an_empty_stream_is_an_error_on_every_rank(rank):
    with pytest.raises(DataError, match="data ranks 1 are empty"):
        listed(prepared(rank, files=[[0, 1, 2], []]))


@pytest.mark.ranks(2)
def test_nothing_anywhere_is_an_epoch_without_steps(rank):
    assert listed(prepared(rank, files=[[], []])) == []


@pytest.mark.ranks(2)
def test_without_even_batches_each_rank_ends_with_its_own_stream(rank):
    loader = prepared(rank, options=LoaderOptions(dispatch_batches=False, even_batches=False))
    expected = [[[0, 1], [2, 3], [4]], [[10, 11], [12, 13], [14, 15], [16, 17]]]
    assert listed(loader) == expected[rank]


@pytest.mark.ranks(2)
def test_a_rank_in_another_pass_is_found_out(rank):
    loader = prepared(rank, files=[[*range(20)], [*range(20)]])
    if rank == 0:
        next(iter(loader))
    with pytest.raises(CollectiveError, match="another pass"):
        listed(loader)


def test_without_other_processes_each_rank_is_on_its_own():
    assert listed(prepared(0)) == [[0, 1], [2, 3], [4, 0]]


class Collecting(Files):
    """Files whose reader frees all unreachable objects of its process after the first element.

    A reader that hangs prints its stacks before the loader gives it up.
    """

    def shard(self, num_shards, index):
        return Collecting(self.files[index::num_shards])

    def __iter__(self):
        faulthandler.dump_traceback_later(60, file=sys.__stderr__)
        for number, element in enumerate(super().__iter__()):
            if number == 1:
                gc.collect()
            yield element
        faulthandler.cancel_dump_traceback_later()


@pytest.mark.ranks(2)
def test_workers_leave_the_groups_of_freed_loaders_to_the_process_that_made_them(rank):
    freed = prepared(rank)
    listed(freed)
    gc.disable()
    try:
        cycle = [freed]
        cycle.append(cycle)
        del freed, cycle  # unreachable, and not freed before the workers have been forked
        loader = DataLoader(Collecting(UNEVEN), batch_size=2, num_workers=1, timeout=90)
        got = listed(prepare_loader(loader, DataShard(rank, 2), options=OPTIONS))
    finally:
        gc.enable()
    assert len(got) == 4

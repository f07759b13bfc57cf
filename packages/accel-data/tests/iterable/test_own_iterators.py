"""Iterable datasets that are their own iterator, and begin again in ``__iter__``: every sample once, resumed or not."""

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from accel_data import prepare_loader
from accel_state.parallelism.config import DataShard


class OwnIterator(IterableDataset):
    def __init__(self, *, divides):
        self.divides = divides

    def __iter__(self):
        info = get_worker_info() if self.divides else None
        self.at, self.step = (0, 1) if info is None else (info.id, info.num_workers)
        return self

    def __next__(self):
        if self.at >= 13:
            raise StopIteration
        self.at += self.step
        return self.at - self.step


def loader_of(workers, *, divides):
    return prepare_loader(DataLoader(OwnIterator(divides=divides), batch_size=2, num_workers=workers), DataShard())


@pytest.mark.filterwarnings("ignore:every reader of OwnIterator:RuntimeWarning")
@pytest.mark.parametrize("divides", [False, True])
@pytest.mark.parametrize(("workers", "later"), [(0, 0), (2, 2), (2, 0), (1, 2)])
@pytest.mark.sampled(2)
def test_a_dataset_that_is_its_own_iterator_is_read_once(divides, workers, later):
    loader = loader_of(workers, divides=divides)
    batches = iter(loader)
    read = [next(batches) for _ in range(3)]
    state = loader.state_dict()
    assert sorted(torch.cat(read + list(batches)).tolist()) == list(range(13))
    resumed = loader_of(later, divides=divides)
    resumed.load_state_dict(state)
    assert sorted(torch.cat(read + list(resumed)).tolist()) == list(range(13))

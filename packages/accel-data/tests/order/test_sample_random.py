"""Augmentation keyed by (seed, epoch, index): the same through workers, ranks, batch sizes, a resume and a resize."""

import json
import random

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from accel_data import LoaderOptions, prepare_loader, sample_rng
from accel_state.parallelism.config import DataShard

SIZE = 24


def drawn_from_globals():
    return torch.rand(()).item(), random.random(), np.random.rand()


def test_generators_of_a_sample_give_the_same_numbers_each_time_and_others_for_another_sample():
    def drawn(*key):
        rng = sample_rng(*key)
        return (
            torch.rand((), generator=rng.torch_generator()).item(),
            rng.numpy_generator().random(),
            rng.python_random().random(),
        )

    keys = [(7, 2, 5), (8, 2, 5), (7, 3, 5), (7, 2, 6), (7, 5, 2), (-7, 2, 5)]
    numbers = [drawn(*key) for key in keys]
    assert numbers == [drawn(*key) for key in keys]
    for of_one_library in zip(*numbers, strict=True):
        assert len(set(of_one_library)) == len(keys)


def test_numbers_are_the_same_on_every_machine_for_ever():
    assert sample_rng(7, 2, 5).key == 0x9BC0164F1E1DEC8E
    assert sample_rng(7, 2, 5).python_random().random() == 0.6714858847148495


def test_global_generators_are_seeded_inside_and_untouched_outside():
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    expected = [drawn_from_globals() for _ in range(2)]
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    assert drawn_from_globals() == expected[0]
    with sample_rng(7, 2, 5).seeded_globals():
        inside = drawn_from_globals()
    with pytest.raises(KeyError), sample_rng(7, 2, 5).seeded_globals():
        {}[drawn_from_globals()]
    assert drawn_from_globals() == expected[1]
    assert inside not in expected


class Augmented(Dataset):
    """A sample, the epoch, and what was drawn for it; by the globals too, which the samples before have moved on."""

    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return SIZE

    def __getitem__(self, index):
        rng = sample_rng(3, self.epoch, index)
        with rng.seeded_globals():
            by_globals = drawn_from_globals()
        return (
            index,
            self.epoch,
            rng.python_random().random(),
            torch.rand((), generator=rng.torch_generator()).item(),
            by_globals,
        )


def loader_of(rank=0, ranks=1, *, batch_size=4, **kwargs):
    loader = DataLoader(Augmented(), batch_size, shuffle=True, collate_fn=list, **kwargs)
    return prepare_loader(loader, DataShard(rank, ranks), options=LoaderOptions(data_seed=1))


def samples(loader):
    return [sample for batch in loader for sample in batch]


WORKERS = [{}, {"num_workers": 1}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}]


@pytest.mark.parametrize("kwargs", WORKERS)
def test_augmentation_is_a_function_of_the_sample_in_every_epoch_whoever_reads_it(kwargs):
    one, other = loader_of(), loader_of(batch_size=3, **kwargs)
    for epoch in range(3):
        expected = samples(one)
        assert samples(other) == expected
        assert {sample[1] for sample in expected} == {epoch}


@pytest.mark.parametrize("kwargs", WORKERS)
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.sampled(3)
def test_augmentation_goes_on_through_a_resume_and_a_resize(ranks, kwargs):
    expected = samples(loader_of())
    loader = loader_of(batch_size=5)
    delivered = next(iter(loader))
    state = json.loads(json.dumps(loader.state_dict()))
    resumed = [loader_of(rank, ranks, batch_size=2, **kwargs) for rank in range(ranks)]
    for one in resumed:
        one.load_state_dict(state)
    for batches in zip(*resumed, strict=True):
        counts = resumed[0].real_counts
        delivered += [sample for batch, count in zip(batches, counts, strict=True) for sample in batch[:count]]
    assert delivered == expected

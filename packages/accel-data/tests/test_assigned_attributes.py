"""Attributes that a script sets on a prepared loader take effect, as on torch's DataLoader, or are refused by name."""

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from accel_data import LoaderOptions, prepare_loader, skip_first_batches
from accel_state.errors import DataStateError
from accel_state.parallelism.config import DataShard

ALONE = DataShard()


class Counting(IterableDataset):
    def __iter__(self):
        return iter(range(8))


class Named(DataLoader):
    """Its batches begin with its name."""

    name = "before"

    def __iter__(self):
        return ([self.name, batch] for batch in super().__iter__())


def total(rows):
    return sum(rows)


def half(rows):
    return sum(rows) / 2


@pytest.mark.parametrize("dataset", [range(8), Counting()], ids=["map", "stream"])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("batch_size", 4),
        ("batch_sampler", [[0]]),
        ("sampler", [0]),
        ("drop_last", True),
        ("dataset", range(3)),
        ("persistent_workers", True),
        ("num_workers", 1),
        ("generator", torch.Generator()),
        ("in_order", False),
    ],
)
def test_what_decides_the_batches_cannot_be_set(dataset, name, value):
    loader = prepare_loader(DataLoader(dataset, batch_size=2), ALONE)
    before = getattr(loader, name)
    with pytest.raises(ValueError, match=f"{name} cannot be set on a prepared loader.*make another DataLoader"):
        setattr(loader, name, value)
    assert getattr(loader, name) is before


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("dataset", [range(8), Counting()], ids=["map", "stream"])
def test_a_collate_function_that_is_set_applies_from_the_next_pass_on(dataset, workers):
    given = DataLoader(dataset, batch_size=2, collate_fn=total, num_workers=workers)
    loader = prepare_loader(given, ALONE)
    batches = iter(loader)
    read = [next(batches)]
    loader.collate_fn = half
    assert read + list(batches) == [1, 5, 9, 13]
    assert list(loader) == [0.5, 2.5, 4.5, 6.5]
    assert loader.collate_fn is half
    assert given.collate_fn is total


def test_a_collate_function_that_is_set_on_a_dispatched_loader_applies():
    options = LoaderOptions(dispatch_batches=True)
    loader = prepare_loader(DataLoader(range(8), batch_size=2, collate_fn=total), ALONE, options=options)
    loader.collate_fn = half
    assert list(loader) == [0.5, 2.5, 4.5, 6.5]


def test_an_attribute_of_the_users_class_reaches_its_iteration():
    loader = prepare_loader(Named(range(2)), ALONE)
    loader.name = "after"
    assert [name for name, _ in loader] == ["after", "after"]


def test_an_attribute_that_no_loader_has_belongs_to_the_prepared_one():
    loader = prepare_loader(DataLoader(range(2)), ALONE)
    loader.remark = "mine"
    assert loader.remark == "mine"
    assert not hasattr(loader.base_dataloader, "remark")


@pytest.mark.parametrize(
    "choose", [lambda loader, epoch: loader.set_epoch(epoch), lambda loader, epoch: loader.sampler.set_epoch(epoch)]
)
def test_an_epoch_may_be_an_integer_of_numpy(choose):
    sampler = DistributedSampler(range(8), num_replicas=1, rank=0)
    loader, expected = (prepare_loader(DataLoader(range(8), sampler=sampler), ALONE) for _ in range(2))
    expected.load_state_dict(loader.state_dict())
    expected.set_epoch(3)
    choose(loader, np.int64(3))
    assert torch.cat(list(loader)).tolist() == torch.cat(list(expected)).tolist()
    assert type(loader.state_dict()["epoch"]) is int


@pytest.mark.parametrize("epoch", [True, 2.0, "2", None, -1])
def test_an_epoch_that_is_no_whole_number_is_refused(epoch):
    with pytest.raises(DataStateError, match=f"a loader's epoch is {epoch!r}; it must be a whole number of at least 0"):
        prepare_loader(DataLoader(range(2)), ALONE).set_epoch(epoch)


@pytest.mark.parametrize("prepare", [lambda loader: loader, lambda loader: prepare_loader(loader, ALONE)])
def test_only_a_whole_number_of_batches_can_be_skipped(prepare):
    loader = prepare(DataLoader(range(4)))
    assert torch.cat(list(skip_first_batches(loader, np.int64(2)))).tolist() == [2, 3]
    for number in (2.0, "2", True, -2, None):
        with pytest.raises(ValueError, match=f"cannot skip {number!r} batches; the number must be a whole number"):
            skip_first_batches(loader, number)

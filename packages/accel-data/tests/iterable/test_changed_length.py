"""Positions of iterable datasets with a length, loaded with a dataset of another length."""

import warnings

import pytest
from torch.utils.data import DataLoader, IterableDataset

from accel_data.options import LoaderOptions
from accel_data.prepare import prepare_loader
from accel_state.errors import DataStateError
from accel_state.parallelism.config import DataShard

OLD = 12


class Sized(IterableDataset):
    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __iter__(self):
        return iter(range(self.length))


def prepared(length, *, allowed=True, dispatch=False):
    options = LoaderOptions(allow_changed_data=allowed, dispatch_batches=dispatch)
    return prepare_loader(DataLoader(Sized(length), batch_size=2, collate_fn=list), DataShard(), options=options)


def state_after(steps):
    batches = iter(loader := prepared(OLD))
    for _ in range(steps):
        next(batches)
    return loader.state_dict()


def flat(loader):
    return [element for batch in loader for element in batch]


@pytest.mark.parametrize("dispatch", [False, True])
@pytest.mark.parametrize(
    ("steps", "length", "told", "expected"),
    [
        (2, 16, "12 samples; this one has 16; position 4 of epoch 0 is kept, and 12 are left to deliver", range(4, 16)),
        (2, 8, "12 samples; this one has 8; position 4 of epoch 0 is kept, and 4 are left to deliver", range(4, 8)),
        (4, 8, "epoch 0 begins anew: the 8 that were delivered of it may come again", range(8)),
        (6, 16, "position 12 of epoch 0, where it ended, is kept", range(16)),
        (6, 8, "position 12 of epoch 0, where it ended, is kept", range(8)),
        (0, 16, "this one has 16; epoch 0 begins with this one", range(16)),
    ],
)
def test_a_position_is_kept_where_there_is_something_behind_it(steps, length, told, expected, dispatch):
    loader = prepared(length, dispatch=dispatch)
    with pytest.warns(RuntimeWarning, match=told):
        loader.load_state_dict(state_after(steps))
    again = loader.state_dict()
    assert flat(loader) == list(expected)
    assert loader.epoch == (2 if steps == 6 else 1)
    other = prepared(length, allowed=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        other.load_state_dict(again)
    assert flat(other) == list(expected)


def test_it_is_refused_unless_it_is_allowed():
    loader = prepared(16, allowed=False)
    with pytest.raises(DataStateError, match=r"12 samples; this one has 16: .* load with allow_changed_data=True"):
        loader.load_state_dict(state_after(2))
    assert flat(loader) == list(range(16))


def test_the_same_length_is_loaded_without_a_warning():
    loader = prepared(OLD)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loader.load_state_dict(state_after(2))
    assert flat(loader) == list(range(4, OLD))

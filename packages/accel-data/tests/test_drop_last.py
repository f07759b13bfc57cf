"""``drop_last`` and a resume on other ranks: what is left is delivered, or a warning says what is dropped."""

import warnings

import pytest
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler

from accel_data import LoaderOptions, prepare_loader
from accel_state.parallelism.config import DataShard

pytestmark = pytest.mark.filterwarnings("ignore:every reader of")


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(10))


class OwnSampler(SequentialSampler):
    pass


LOADERS = {
    "map": lambda: DataLoader(range(10), batch_size=2, drop_last=True),
    "own sampler": lambda: DataLoader(range(10), batch_size=2, drop_last=True, sampler=OwnSampler(range(10))),
    "own batch sampler": lambda: DataLoader(
        range(10), batch_sampler=BatchSampler(OwnSampler(range(10)), 2, drop_last=True)
    ),
    "stream": lambda: DataLoader(Stream(), batch_size=2, drop_last=True),
}


def prepared(kind, rank, ranks, even=True):
    options = LoaderOptions(dispatch_batches=False, even_batches=even)
    return prepare_loader(LOADERS[kind](), DataShard(rank, ranks), options=options)


def state_behind(kind, steps, ranks=1, even=True):
    passing = iter(loader := prepared(kind, 0, ranks, even))
    for _ in range(steps):
        next(passing)
    return loader.state_dict()


@pytest.mark.parametrize("counts_epochs", [False, True])
@pytest.mark.parametrize("kind", LOADERS)
def test_less_than_a_step_that_is_left_is_a_warning_with_numbers_on_every_rank(kind, counts_epochs):
    saved = state_behind(kind, 4)
    left = "what is left" if kind == "stream" else "the 2 samples that are left"
    for rank in range(2):
        loader = prepared(kind, rank, 2)
        with pytest.warns(RuntimeWarning, match=rf"epoch 0 .*sample 8: .* takes 4 samples here, .* drops {left}"):
            passes = loaded_passes(loader, saved, counts_epochs)
        # With an order that is computed, the next pass is the next epoch unless the script counts epochs.
        assert passes == [2 if kind == "map" and not counts_epochs else 0, 2]


def loaded_passes(loader, saved, counts_epochs):
    """The number of batches of each of two passes."""
    loader.load_state_dict(saved)
    if counts_epochs:
        loader.set_epoch(0)
    return [len(list(loader)), len(list(loader))]


@pytest.mark.parametrize("even", [True, False])
@pytest.mark.parametrize("kind", LOADERS)
def test_an_epoch_that_its_own_run_had_finished_is_no_warning(kind, even):
    saved = state_behind(kind, 2, ranks=2, even=even)
    assert saved["ended"]
    for ranks in (1, 2):
        loader = prepared(kind, 0, ranks, even)
        with warnings.catch_warnings(action="error"):
            warnings.filterwarnings("ignore", "every reader of")
            loader.load_state_dict(saved)
            assert next(iter(loader)).tolist() == [0, 1]


@pytest.mark.parametrize("kind", LOADERS)
def test_fewer_ranks_deliver_what_is_left(kind):
    loader = prepared(kind, 0, 1)
    with warnings.catch_warnings(action="error"):
        warnings.filterwarnings("ignore", "every reader of")
        loader.load_state_dict(state_behind(kind, 1, ranks=2))
        assert [batch.tolist() for batch in loader] == [[4, 5], [6, 7], [8, 9]]

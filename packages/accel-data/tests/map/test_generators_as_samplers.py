"""A generator as sampler serves one pass: a second one is refused, because it would lose what was drawn ahead."""

import pytest
import torch
from torch.utils.data import DataLoader

from accel_data import prepare_loader, skip_first_batches
from accel_state.errors import DataError
from accel_state.parallelism.config import DataShard


class Restarting:
    """Its iterator is itself, and begins again."""

    def __iter__(self):
        self.left = [3, 2, 1, 0]
        return self

    def __next__(self):
        if not self.left:
            raise StopIteration
        return self.left.pop()


def loader_of(sampler):
    return prepare_loader(DataLoader(range(4), sampler=sampler), DataShard())


def test_a_position_of_a_generator_resumes_with_a_new_generator():
    loader = loader_of(index for index in (2, 0, 3, 1))
    batches = iter(loader)
    read = torch.cat([next(batches), next(batches)]).tolist()
    resumed = loader_of(index for index in (2, 0, 3, 1))
    resumed.load_state_dict(loader.state_dict())
    assert read + torch.cat(list(resumed)).tolist() == [2, 0, 3, 1]


@pytest.mark.parametrize(
    "sampler", [lambda: (n for n in range(4)), lambda: iter([0, 1, 2, 3])], ids=["generator", "iter"]
)
@pytest.mark.parametrize("leaves", [True, False])
def test_a_second_pass_over_an_iterator_is_refused(sampler, leaves):
    loader = loader_of(sampler())
    for _ in loader:
        if leaves:
            break
    with pytest.raises(DataError, match=r"the sampler is a (generator|list_iterator), which gives its indices once"):
        next(iter(loader))


def test_skipping_in_a_generator_of_batches_is_refused_when_it_is_read():
    loader = prepare_loader(DataLoader(range(4), batch_sampler=([n] for n in range(4))), DataShard())
    skipped = skip_first_batches(loader, 1)
    with pytest.raises(DataError, match="the batch sampler is a generator, which gives its indices once"):
        next(iter(skipped))


def test_an_iterator_that_begins_again_serves_every_pass():
    loader = loader_of(Restarting())
    assert [torch.cat(list(loader)).tolist() for _ in range(2)] == [[0, 1, 2, 3]] * 2


def test_a_batch_sampler_that_is_its_own_iterator_is_skipped_in():
    class Pairs(Restarting):
        def __next__(self):
            return [super().__next__()] * 2

    loader = prepare_loader(DataLoader(range(4), batch_sampler=Pairs()), DataShard())
    assert torch.cat(list(skip_first_batches(loader, 1))).tolist() == [1, 1, 2, 2, 3, 3]
    assert torch.cat(list(loader)).tolist() == [0, 0, 1, 1, 2, 2, 3, 3]

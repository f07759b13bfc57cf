"""Random draws of streams in workers: alike where workers read the same stream, different where they divide it."""

import random

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from accel_data.prepare import prepare_loader
from accel_state.parallelism.config import DataShard

pytestmark = pytest.mark.filterwarnings("ignore:every reader of")


class Drawing(IterableDataset):
    """A draw for each of eight elements; divided among workers or not."""

    def __init__(self, divided=False):
        self.divided = divided

    def __iter__(self):
        info = get_worker_info() if self.divided else None
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        return (torch.rand(()).item() for _ in range(first, 8, step))


class NumberedCollation:
    """Asks for the number of the worker in each collation."""

    def __call__(self, samples):
        assert get_worker_info().id is not None
        return samples


def epochs(dataset, **kwargs):
    torch.manual_seed(3)
    loader = DataLoader(dataset, batch_size=2, **{"collate_fn": list, **kwargs})
    prepared = prepare_loader(loader, DataShard())
    return [[draw for batch in prepared for draw in batch] for _ in range(2)]


def test_workers_of_one_stream_draw_the_same_numbers_whatever_their_number():
    one = epochs(Drawing(), num_workers=1)
    assert len(set(one[0] + one[1])) == 16
    assert epochs(Drawing(), num_workers=2) == one
    assert epochs(Drawing(), num_workers=2, persistent_workers=True) == one


def test_workers_of_streams_of_their_own_draw_others():
    first, second = epochs(Drawing(divided=True), num_workers=2)
    assert len(set(first + second)) == 16
    assert epochs(Drawing(divided=True), num_workers=2, persistent_workers=True) == [first, second]


@pytest.mark.parametrize("divided", [False, True])
def test_a_collation_that_asks_for_its_worker_changes_no_draw(divided):
    expected = epochs(Drawing(divided), num_workers=2)
    assert epochs(Drawing(divided), num_workers=2, collate_fn=NumberedCollation()) == expected


def noisy(samples):
    """Collates with a draw from each global generator."""
    return [(sample, torch.rand(()).item(), random.random(), float(np.random.rand())) for sample in samples]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("cut", [1, 2, 3])
@pytest.mark.parametrize("divided", [False, True])
@pytest.mark.parametrize("workers", [{"num_workers": 1}, {"num_workers": 2, "persistent_workers": True}])
def test_a_resumed_stream_repeats_the_draws_of_collation(workers, divided, cut):
    def prepared():
        torch.manual_seed(3)
        return prepare_loader(DataLoader(Drawing(divided), batch_size=2, collate_fn=noisy, **workers), DataShard())

    loader, batches, state = prepared(), [], None
    for batch in loader:
        batches.append(batch)
        if len(batches) == cut:
            state = loader.state_dict()
    assert len({draw for batch in batches for row in batch for draw in row}) == 32
    resumed = prepared()
    resumed.load_state_dict(state)
    assert list(resumed) == batches[cut:]
    assert list(resumed) == list(loader)


@pytest.mark.parametrize("divided", [False, True])
def test_draws_of_collation_change_no_draw_of_the_dataset(divided):
    plain = epochs(Drawing(divided), num_workers=2)
    drawn = epochs(Drawing(divided), num_workers=2, collate_fn=noisy)
    assert [[row[0] for row in rows] for rows in drawn] == plain


class Shuffled(IterableDataset):
    """Sixteen numbers in an order that is drawn when a pass begins."""

    def __iter__(self):
        return iter(torch.randperm(16).tolist())


@pytest.mark.parametrize("workers", [{"num_workers": 1}, {"num_workers": 2, "persistent_workers": True}], ids=str)
def test_ranks_that_are_seeded_alike_draw_the_same_order_of_one_stream(workers):
    def of_rank(rank):
        torch.manual_seed(3)
        loader = prepare_loader(DataLoader(Shuffled(), batch_size=2, collate_fn=list, **workers), DataShard(rank, 2))
        return [[number for batch in loader for number in batch] for _ in range(2)]

    for first, second in zip(of_rank(0), of_rank(1), strict=True):
        assert sorted(first + second) == list(range(16))


def test_ranks_collate_the_same_step_with_draws_of_their_own():
    def of_rank(rank):
        torch.manual_seed(3)
        loader = DataLoader(Drawing(), batch_size=2, collate_fn=noisy, num_workers=1)
        return [row[1:] for batch in prepare_loader(loader, DataShard(rank, 2)) for row in batch]

    assert not {draw for row in of_rank(0) for draw in row} & {draw for row in of_rank(1) for draw in row}

"""Samplers that give ranks different indices are named, with the ranks and the first step that differs."""

import logging
import random
import time
from array import array
from contextlib import contextmanager
from logging.handlers import QueueHandler
from queue import SimpleQueue

import pytest
import torch
from torch.utils.data import DataLoader

from accel_data import Cursor, prepare_loader
from accel_data.map.index_agreement import _KEPT, _PUBLISHED, IndexCheck
from accel_state.collectives.objects import all_gather_object
from accel_state.errors import DataError
from accel_state.parallelism.config import DataShard

LIMIT = 60.0
"""Seconds after which a difference would have been found on any machine; a test that passes takes about one."""


class Board(dict):
    """A store in one process."""

    def set(self, key, value):
        self[key] = value

    def check(self, keys):
        return all(key in self for key in keys)

    def get(self, key):
        return self[key]

    def delete_key(self, key):
        del self[key]


def trails(ranks=2, start=None):
    return [IndexCheck("loader", rank, 0, "Mine").trail(start or Cursor()) for rank in range(ranks)]


def walk(trail, rounds):
    for indices in rounds:
        trail.add([indices])


ROUNDS = [[2 * i, 2 * i + 1] for i in range(3000)]


@pytest.mark.parametrize("at", [0, 1, 700, 1999])
def test_the_first_step_that_differs_is_named(at):
    first, second = trails()
    walk(first, ROUNDS[:2000])
    walk(second, [*ROUNDS[:at], [5, 5], *ROUNDS[at + 1 : 2000]])
    board = Board()
    first.compare(board)
    told = second.compare(board)
    exact = "" if at >= 2000 - _PUBLISHED else " or one before it"
    step = max(at, 2000 - _PUBLISHED) + 1 if at else 2000 - _PUBLISHED + 1
    assert f"Mine of rank 1 gave other indices than that of rank 0 in epoch 0, from step {step}{exact} on." in told


def test_steps_are_named_exactly_where_those_before_have_been_compared():
    board, (first, second) = Board(), trails(start=Cursor(2, 40))
    for begin in range(0, 3000, 500):
        walk(first, ROUNDS[begin : begin + 500])
        walk(second, ROUNDS[begin : begin + 500])
        first.compare(board)
        assert second.compare(board) is None
    walk(first, [[1, 2], [3, 4]])
    walk(second, [[1, 2], [4, 3]])
    first.compare(board)
    assert "in epoch 2, from step 3002 on (counted from sample 40)" in second.compare(board)


def test_a_rank_that_is_ahead_or_behind_differs_only_by_what_both_have_read():
    board, (first, second) = Board(), trails()
    walk(first, ROUNDS[:10])
    first.compare(board)
    walk(second, ROUNDS[:30])
    assert second.compare(board) is None
    walk(first, ROUNDS[10:2500])
    first.compare(board, closed=True)
    assert second.compare(board, closed=True) is None
    assert second.is_settled(board)


@pytest.mark.parametrize(("counts", "step"), [((4, 3), 4), ((3, 4), 4)])
def test_a_sampler_that_ends_early_on_one_rank_is_named(counts, step):
    board, both = Board(), trails()
    for trail, count in zip(both, counts, strict=True):
        walk(trail, ROUNDS[:count])
        trail.complete = True
    first, second = both
    first.compare(board, closed=True)
    assert f"from step {step}, because it has {counts[1]} steps and {counts[0]} are known there" in second.compare(
        board, closed=True
    )


def test_what_is_kept_is_bounded():
    first, second = trails()
    for trail in (first, second):
        trail._digests = array("I", bytes(4 * (_KEPT + 5)))
    board = Board()
    first.compare(board)
    assert len(first._digests) == _PUBLISHED
    assert len(board[first._key]) < 5000
    assert second.compare(board) is None
    assert len(second._digests) == 1


def test_what_was_published_for_earlier_passes_is_deleted():
    board, check = Board(), IndexCheck("loader", 0, 0, "Mine")
    for epoch in range(20):
        trail = check.trail(Cursor(epoch))
        for _ in range(3):
            trail.compare(board)
    assert len(board) == 4
    assert board.check([trail._key])


@pytest.mark.parametrize(
    ("one", "other", "differs"),
    [
        ([1, 2], [2, 1], True),
        ([torch.tensor(1)], [1], False),
        (["a"], ["b"], True),
        ([(1, "a")], [(1, "b")], True),
        ([object()], [object()], False),
        ([1 << 80], [1 << 81], True),
    ],
)
def test_indices_of_any_kind_are_compared_by_value_or_not_at_all(one, other, differs):
    first, second = trails()
    walk(first, [one])
    walk(second, [other])
    board = Board()
    first.compare(board)
    assert (second.compare(board) is not None) == differs


class Wayward:
    """A sampler that draws from a generator of its own that nobody seeds; alike on all ranks before ``at``."""

    def __init__(self, size, at=0, rank=0):
        self.size, self.at, self.random = size, at, random.Random(rank)

    def __iter__(self):
        yield from range(self.at)
        yield from self.random.sample(range(self.at, self.size), self.size - self.at)

    def __len__(self):
        return self.size


def prepared(rank, ranks, sampler, **kwargs):
    loader = DataLoader(range(sampler.size), batch_size=2, sampler=sampler, **kwargs)
    return prepare_loader(loader, DataShard(rank, ranks))


def read(loader, pause):
    """Steps that a slow loop gets of a loader."""
    began, steps = time.monotonic(), 0
    for _ in loader:
        steps += 1
        time.sleep(pause)
        assert time.monotonic() < began + LIMIT
    return steps


@contextmanager
def logged():
    """The messages that the loaders' threads log meanwhile."""
    handler = QueueHandler(SimpleQueue())
    logger = logging.getLogger("accel_data.failure_relay")
    logger.addHandler(handler)
    try:
        yield handler.queue
    finally:
        logger.removeHandler(handler)


DIFFERS = r"Wayward of rank [12] gave other indices than that of rank 0 in epoch 0, from step"


@pytest.mark.ranks(3)
@pytest.mark.parametrize("kwargs", [{}, {"num_workers": 1}], ids=str)
def test_every_rank_stops_where_samplers_differ(rank, world_size, kwargs):
    loader = prepared(rank, world_size, Wayward(100_000, 60, rank), **kwargs)
    with pytest.raises(DataError, match=DIFFERS):
        read(loader, 0.01)


@pytest.mark.ranks(2)
def test_an_epoch_too_short_to_be_compared_meanwhile_is_compared_behind_it(rank, world_size):
    loader = prepared(rank, world_size, Wayward(40, 12, rank))
    with logged() as messages:
        assert read(loader, 0) == 10
        if rank == 1:
            assert "from step 4 on" in messages.get(timeout=LIMIT).getMessage()
    all_gather_object(None)
    with pytest.raises(DataError, match=DIFFERS + " 4 on"):
        read(loader, 0.1)


class Short(Wayward):
    """The same indices on all ranks, but fewer on rank 1."""

    def __iter__(self):
        return iter(range(self.size if self.at else self.size - 8))

    def __len__(self):
        return self.size


@pytest.mark.ranks(2)
def test_a_rank_that_waits_for_one_without_a_batch_hears_why(rank, world_size):
    loader, steps = prepared(rank, world_size, Short(40, at=1 - rank)), 0
    if rank == 1:
        assert read(loader, 0) == 8
        return
    with logged() as messages, pytest.raises(DataError, match="from step 9"):  # noqa: PT012
        for _ in loader:
            steps += 1
            if steps == 9:
                assert "Short of rank 1" in messages.get(timeout=LIMIT).getMessage()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stop", [None, 3])
def test_samplers_that_agree_are_left_in_peace(rank, world_size, stop):
    torch.manual_seed(rank)
    loader = prepared(rank, world_size, Wayward(120, 120))
    with logged() as messages:
        for _ in range(3):
            for number, _ in enumerate(loader):
                time.sleep(0.03)
                if number == stop:
                    break
        assert messages.empty()

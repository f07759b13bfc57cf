"""Streams shared by several readers: the pinned tables, and that nothing is lost or repeated but declared padding."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset

from accel_data.iterable.dataset_shard import IterableDatasetShard
from accel_data.iterable.stride import Stride, StridePart, parts
from accel_state.errors import ConfigError


class Numbers(IterableDataset):
    """A stream that knows nothing of ranks and workers."""

    def __init__(self, n):
        self.n = n

    def __iter__(self):
        return iter(range(self.n))

    def __len__(self):
        return self.n


class Shuffled(Numbers):
    """A stream that shuffles with its own generator."""

    def __init__(self, n):
        super().__init__(n)
        self.generator = torch.Generator()

    def __iter__(self):
        return iter(torch.randperm(self.n, generator=self.generator).tolist())


def shards(n, **options):
    return [list(IterableDatasetShard(Numbers(n), 4, num_processes=2, process_index=r, **options)) for r in range(2)]


@pytest.mark.parametrize(
    ("split", "drop", "n", "expected"),
    [
        (False, False, 10, [[0, 1, 2, 3, 8, 9, 0, 1], [4, 5, 6, 7, 2, 3, 4, 5]]),
        (False, False, 3, [[0, 1, 2, 0], [1, 2, 0, 1]]),
        (False, False, 8, [[0, 1, 2, 3], [4, 5, 6, 7]]),
        (False, True, 10, [[0, 1, 2, 3], [4, 5, 6, 7]]),
        (False, True, 3, [[], []]),
        (True, False, 10, [[0, 1, 4, 5, 8, 9], [2, 3, 6, 7, 0, 1]]),
        (True, False, 3, [[0, 1], [2, 0]]),
        (True, True, 10, [[0, 1, 4, 5], [2, 3, 6, 7]]),
    ],
)
def test_two_shards_of_batch_four_read_the_pinned_elements(split, drop, n, expected):
    assert shards(n, split_batches=split, drop_last=drop) == expected


streams = st.integers(0, 60)
strides = st.fixed_dictionaries(
    {"batch_size": st.integers(1, 5), "shards": st.integers(1, 4), "drop_last": st.booleans(), "even": st.booleans()}
)


def read(n, skip=0, **options):
    """What every shard receives, in order."""
    return [list(parts(range(n), Stride(**options, index=i), skip=skip)) for i in range(options["shards"])]


@given(streams, strides)
def test_every_element_is_delivered_once_after_removing_declared_padding(n, options):
    received = read(n, **options)
    real = sorted(element for shard in received for part in shard for element in part.elements[: part.real])
    group = options["batch_size"] * options["shards"]
    assert real == list(range(n - n % group if options["drop_last"] else n))


@given(streams, strides)
def test_the_interleaved_batches_are_the_stream_repeated(n, options):
    options |= {"even": True, "drop_last": False}
    received = read(n, **options)
    order = [element for step in zip(*received, strict=True) for part in step for element in part.elements]
    size = options["batch_size"] * options["shards"]
    beginning = list(range(min(n, size)))
    assert order[:n] == list(range(n))
    assert order[n:] == [beginning[i % len(beginning)] for i in range(len(order) - n)]
    assert len(order) % size == 0


@given(streams, strides)
def test_the_length_is_what_is_delivered(n, options):
    for index, received in enumerate(read(n, **options)):
        assert Stride(**options, index=index).length(n) == sum(len(part.elements) for part in received)


@given(streams, strides, st.integers(1, 4))
def test_workers_in_turn_deliver_what_one_reader_delivers(n, options, workers):
    for index, expected in enumerate(read(n, **options)):
        queues = [
            list(parts(range(n), Stride(**options, index=index, workers=workers, worker=worker)))
            for worker in range(workers)
        ]
        in_turn = [queues[turn % workers][turn // workers] for turn in range(len(expected))]
        assert in_turn == expected
        assert sum(map(len, queues)) == len(expected)


@given(st.data(), streams, strides)
def test_a_stream_left_anywhere_goes_on_with_any_number_of_shards(data, n, options):
    options |= {"drop_last": False}
    seen: list[int] = []
    for _ in range(3):
        options["shards"] = data.draw(st.integers(1, 4))
        options["batch_size"] = data.draw(st.integers(1, 5))
        received = read(n, skip=len(seen), **options)
        steps = data.draw(st.integers(0, max(map(len, received))))
        seen += sorted(e for shard in received for part in shard[:steps] for e in part.elements[: part.real])
    rest = read(n, skip=len(seen), **options)
    seen += sorted(e for shard in rest for part in shard for e in part.elements[: part.real])
    assert seen == list(range(n))


def test_the_last_group_says_how_much_of_it_is_real():
    assert read(10, batch_size=4, shards=2)[0][1] == StridePart([8, 9, 0, 1], 2, 2, 10)
    assert read(10, batch_size=4, shards=2)[1][1] == StridePart([2, 3, 4, 5], 0, 2, 10)


@pytest.mark.parametrize(("workers", "n"), [(0, 10), (1, 10), (2, 10), (2, 37), (2, 3)])
def test_a_loader_with_workers_delivers_the_order_of_one_without(workers, n):
    def batches(num_workers):
        shard = IterableDatasetShard(Numbers(n), 4, num_processes=2, process_index=1)
        return [batch.tolist() for batch in DataLoader(shard, batch_size=4, num_workers=num_workers)]

    assert batches(workers) == batches(0)


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("drop", [False, True])
@pytest.mark.parametrize("n", [0, 1, 3, 8, 10])
def test_the_length_of_a_sized_source_is_exact(split, drop, n):
    for rank in range(2):
        shard = IterableDatasetShard(
            Numbers(n), 4, num_processes=2, process_index=rank, split_batches=split, drop_last=drop
        )
        assert len(shard) == len(list(shard))


def test_a_generator_needs_no_set_epoch():
    first, second = (IterableDatasetShard(Shuffled(8), 2, num_processes=2, process_index=r) for r in range(2))
    assert sorted([*first, *second]) == list(range(8))
    before = list(first)
    assert list(first) == before
    first.set_epoch(1)
    assert list(first) != before


def test_the_epoch_reaches_the_dataset():
    class Source(Numbers):
        def set_epoch(self, epoch):
            self.epoch = epoch

    shard = IterableDatasetShard(Source(3))
    shard.set_epoch(5)
    assert (shard.epoch, shard.dataset.epoch) == (5, 5)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"batch_size": 3, "num_processes": 2, "split_batches": True}, "round multiple"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"num_processes": 2, "process_index": 2}, "index is 2"),
    ],
)
def test_impossible_shards_are_refused(options, words):
    with pytest.raises(ConfigError, match=words):
        IterableDatasetShard(Numbers(3), **options)

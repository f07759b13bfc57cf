"""What a dataset can do is one value, and one named strategy with its promise follows from it."""

import itertools

import pytest
from torch.utils.data import DataLoader, IterableDataset

from accel_data.iterable.capabilities import StreamCapabilities, inspect_stream, is_seekable, resolve
from accel_data.prepare import prepare_loader
from accel_state.errors import ConfigError
from accel_state.parallelism.config import DataShard


class Numbers(IterableDataset):
    def __iter__(self):
        return iter(range(3))


class Seekable(Numbers):
    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


class Shardable(Numbers):
    num_shards = 2

    def shard(self, num_shards, index, contiguous=True):
        return self


@pytest.mark.parametrize(
    ("capabilities", "options", "mode", "amplification"),
    [
        ({}, {"ranks": 1}, "stride", 1),
        ({}, {"ranks": 1, "workers": 3}, "stride", None),
        ({"worker_dependent": False}, {"ranks": 1, "workers": 3}, "stride", 3),
        ({"worker_dependent": False}, {"ranks": 4, "workers": 3}, "stride", 12),
        ({"worker_dependent": True}, {"ranks": 4, "workers": 3}, "stride", 4),
        ({"shardable": True, "worker_dependent": True}, {"ranks": 4, "workers": 3}, "native", 1),
        ({"shardable": True, "worker_dependent": False}, {"ranks": 4, "workers": 3}, "native", 3),
        ({"shardable": True, "num_shards": 4}, {"ranks": 4}, "native", 1),
        ({"shardable": True, "num_shards": 3}, {"ranks": 4}, "stride", 4),
        ({"shardable": True}, {"ranks": 4, "exact": True}, "stride", 4),
        ({"worker_dependent": True}, {"ranks": 4, "workers": 3, "exact": True}, "stride", 12),
        ({"shardable": True, "presharded": "it says so"}, {"ranks": 4}, "given", 1),
        ({}, {"ranks": 4, "already_sharded": True}, "given", 1),
    ],
)
def test_the_strategy_follows_from_what_the_dataset_can_do(capabilities, options, mode, amplification):
    strategy = resolve(StreamCapabilities(**capabilities), **options)
    assert (strategy.mode, strategy.amplification) == (mode, amplification)


def test_exact_streams_of_a_dataset_that_was_split_are_refused():
    with pytest.raises(ConfigError, match="it was split by node"):
        resolve(StreamCapabilities(presharded="it was split by node"), ranks=2, exact=True)


def test_a_shard_method_of_another_kind_is_not_asked():
    class Other(Numbers):
        def shard(self, path):
            return path

    assert inspect_stream(Other()) == StreamCapabilities()
    assert inspect_stream(Seekable()) == StreamCapabilities(seekable=True)
    assert inspect_stream(Shardable()) == StreamCapabilities(shardable=True, num_shards=2)


def test_a_shuffle_buffer_that_would_be_lost_is_not_sought():
    class BufferShuffledExamplesIterable:
        ex_iterable = None

    class Mapped:
        ex_iterable = BufferShuffledExamplesIterable()

    dataset = Seekable()
    assert is_seekable(dataset)
    dataset._ex_iterable = Mapped()
    assert not is_seekable(dataset)


def test_every_combination_has_a_name_a_promise_and_an_amplification():
    """Amplification is 1 only where each element is read by one reader."""
    names = set()
    for ranks, workers, shardable, dependent, presharded, seekable in itertools.product(
        (1, 3), (0, 1, 2), (False, True), (False, True), (None, "it says so"), (False, True)
    ):
        capabilities = StreamCapabilities(
            shardable=shardable, presharded=presharded, seekable=seekable, worker_dependent=dependent
        )
        strategy = resolve(capabilities, ranks=ranks, workers=workers)
        names.add(strategy.name)
        assert strategy.promise.startswith("exact")
        assert strategy.promise.endswith("seeks") is seekable
        shared = ranks if ranks > 1 and not shardable and presharded is None else 1
        assert strategy.amplification == shared * (1 if dependent else max(workers, 1))
        assert (strategy.warning("X") is None) == (strategy.amplification == 1)
    assert names == {
        "one stream",
        "worker streams",
        "shards",
        "shards of workers",
        "sharded before",
        "sharded before, of workers",
    }


def test_exactness_hides_workers_from_the_dataset():
    strategy = resolve(StreamCapabilities(shardable=True, worker_dependent=True), ranks=2, workers=2, exact=True)
    assert (strategy.name, strategy.amplification) == ("one stream", 4)
    assert "because exact_streams=True: 2 ranks x 2 workers = 4 times" in strategy.warning("X")


def test_a_state_that_needs_arguments_is_for_the_loader_of_its_library():
    class Counted(Numbers):
        def state_dict(self, num_samples, from_beginning):
            return {"samples": num_samples}

        def load_state_dict(self, state):
            raise AssertionError(state)

    assert not is_seekable(Counted())
    loader = prepare_loader(DataLoader(Counted(), batch_size=2), DataShard())
    assert len(list(loader)) == len(list(DataLoader(Numbers(), batch_size=2)))

"""A prepared loader is the user's DataLoader, knows its last batch, and leaves nothing behind."""

import gc
import json
import pickle
import random
import re
import subprocess
import sys
import weakref

import numpy as np
import pytest
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
)

from accel_data import (
    LoaderOptions,
    PreparedLoader,
    SeedableRandomSampler,
    prepare_data_loader,
    prepare_loader,
    skip_first_batches,
)
from accel_state.errors import ConfigError, DataError
from accel_state.parallelism.config import DataShard

ALONE = DataShard(0, 1)


class Squares(Dataset):
    """At module level, so that it can be pickled."""

    def __init__(self, size=16):
        self.size = size
        self.epochs = []

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return torch.tensor(index)

    def set_epoch(self, epoch):
        self.epochs.append(epoch)


class Watching:
    """An observer that remembers what it is told."""

    def __init__(self):
        self.calls = []

    def began(self, loader):
        self.calls.append("began")

    def ended(self, loader):
        self.calls.append("ended")


def prepared(size=16, shard=ALONE, *, observer=None, options=None, **kwargs):
    kwargs.setdefault("batch_size", 4)
    options = options or LoaderOptions(data_seed=1)
    return prepare_loader(DataLoader(Squares(size), **kwargs), shard, options=options, observer=observer)


def passing_identity(batch):
    return batch


def waking(worker):
    del worker


class SpecialLoader(DataLoader):
    """A subclass with an attribute that nobody can guess."""

    def __init__(self, *args, flavour, **kwargs):
        super().__init__(*args, **kwargs)
        self.flavour = flavour


@pytest.mark.parametrize("shard", [ALONE, DataShard(1, 2)])
@pytest.mark.parametrize(
    "kwargs",
    [
        {},
        {"batch_size": None},
        {"shuffle": True, "drop_last": True, "generator": torch.Generator()},
        {"collate_fn": passing_identity, "pin_memory": False, "worker_init_fn": waking},
        {
            "num_workers": 2,
            "prefetch_factor": 5,
            "persistent_workers": True,
            "timeout": 9.0,
            "multiprocessing_context": "spawn",
        },
        {"sampler": RandomSampler(range(16), replacement=True, num_samples=5)},
        {"batch_sampler": [[1, 2], [3]], "batch_size": 1},
    ],
)
def test_every_attribute_of_the_users_loader_is_kept(kwargs, shard):
    original = SpecialLoader(Squares(), flavour="salt", **kwargs)
    before = dict(vars(original))
    loader = prepare_loader(original, shard, options=LoaderOptions(data_seed=1))
    slot = "sampler" if original.batch_sampler is None else "batch_sampler"
    for copied in (loader, skip_first_batches(loader, 1)):
        kept = {name: value for name, value in vars(copied.base_dataloader).items() if name != slot}
        assert kept == {name: value for name, value in before.items() if name != slot}
        assert copied.flavour == "salt"
        assert copied.num_workers == original.num_workers
    assert vars(original) == before


@pytest.mark.parametrize("kwargs", [{}, {"num_workers": 1}])
def test_it_is_an_instance_of_the_users_class(kwargs):
    original = SpecialLoader(Squares(), flavour="sweet", **kwargs)
    loader = prepare_loader(original, ALONE)
    assert isinstance(loader, DataLoader)
    assert isinstance(loader, SpecialLoader)


def test_an_unknown_attribute_is_an_attribute_error():
    with pytest.raises(AttributeError, match="nothing_like_this"):
        _ = prepared().nothing_like_this


def test_preparing_twice_is_preparing_once():
    loader = prepared()
    assert prepare_loader(loader, ALONE) is loader


@pytest.mark.parametrize(
    "kwargs", [{}, {"sampler": range(16)}, {"batch_sampler": [[0], [1, 2], [3], [4]], "batch_size": 1}]
)
def test_the_last_batch_is_known_when_it_is_delivered_in_every_pass(kwargs):
    loader = prepared(**kwargs)
    for _ in range(2):
        assert [loader.end_of_dataloader for _ in loader] == [False, False, False, True]


def test_batches_left_counts_down_to_zero():
    loader = prepared(14)
    assert [loader.batches_left for _ in loader] == [3, 2, 1, 0]


def test_batches_left_are_unknown_behind_a_length_that_is_too_small():
    class Short:
        def __iter__(self):
            return iter([[0, 1], [2, 3], [4, 5], [6, 7]])

        def __len__(self):
            return 1

    loader = prepared(8, batch_size=1, batch_sampler=Short())
    left = [(loader.batches_left, loader.end_of_dataloader) for _ in loader]
    assert left[-1] == (0, True)
    assert all(count is None or count > 0 for count, _ in left[:-1])


@pytest.mark.parametrize(("size", "drop_last", "expected"), [(16, False, 0), (11, False, 3), (11, True, 0)])
def test_remainder_is_what_the_last_step_holds(size, drop_last, expected):
    loader = prepared(size, DataShard(0, 2), drop_last=drop_last)
    assert loader.remainder == -1
    for _ in loader:
        assert loader.remainder == expected


def test_epochs_count_passes():
    loader = prepared()
    for _ in loader:
        break
    assert loader.iteration == 1
    list(loader)
    assert (loader.iteration, loader.epoch) == (2, 2)
    assert loader.dataset.epochs == [0, 1]


def test_ranks_without_a_batch_count_epochs_like_the_others():
    ranks = [prepared(2, DataShard(r, 2), options=LoaderOptions(even_batches=False, data_seed=0)) for r in range(2)]
    assert [len(list(loader)) for loader in ranks] == [1, 0]
    assert [loader.epoch for loader in ranks] == [1, 1]


def test_an_empty_dataset_ends_at_once_and_stays_in_its_epoch():
    loader = prepared(0)
    assert list(loader) == []
    assert loader.epoch == 0


def test_each_epoch_has_an_order_of_its_own_and_can_be_chosen():
    loader = prepared(64, shuffle=True)
    first, second = (torch.cat(list(loader)).tolist() for _ in range(2))
    assert first != second
    loader.set_epoch(0)
    assert torch.cat(list(loader)).tolist() == first


def test_the_epoch_reaches_a_custom_batch_sampler_and_what_it_wraps():
    class Inner:
        epoch = None

        def set_epoch(self, epoch):
            self.epoch = epoch

    class Outer(list):
        epoch = None

        def set_epoch(self, epoch):
            self.epoch = epoch

    outer = Outer([[0, 1], [2, 3]])
    outer.sampler = Inner()
    loader = prepared(batch_sampler=outer, batch_size=1)
    loader.set_epoch(3)
    passing = iter(loader)
    next(passing)
    assert (outer.epoch, outer.sampler.epoch) == (3, 3)


@pytest.mark.parametrize("stop", [None, 0, 2])
def test_the_observer_hears_of_every_end(stop):
    watching = Watching()
    loader = prepared(observer=watching)
    for number, _ in enumerate(loader):
        if number == stop:
            break
    assert watching.calls == ["began", "ended"]


def test_the_observer_hears_of_an_end_by_failure():
    watching = Watching()
    loader = prepared(observer=watching, collate_fn=lambda samples: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        list(loader)
    assert watching.calls == ["began", "ended"]


def test_loops_may_be_nested_in_each_other():
    watching = Watching()
    outer, inner = prepared(8, observer=watching), prepared(4, observer=watching)
    ends = []
    for _ in outer:
        list(inner)
        ends.append((outer.end_of_dataloader, inner.end_of_dataloader))
    assert ends == [(False, True), (True, True)]
    assert watching.calls == ["began", "began", "ended", "began", "ended", "ended"]


class Holder:
    def __init__(self, loader):
        self.loader = loader
        self.iterator = iter(loader)
        next(self.iterator)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kwargs", [{"shuffle": True}, {"sampler": range(16)}, {"num_workers": 1}])
def test_a_loader_in_flight_is_freed_at_once(kwargs):
    watching = Watching()
    gc.collect()
    gc.disable()
    try:
        holder = Holder(prepared(observer=watching, **kwargs))
        references = [weakref.ref(holder), weakref.ref(holder.loader), weakref.ref(holder.loader.dataset)]
        del holder
        assert [reference() for reference in references] == [None] * 3
    finally:
        gc.enable()
    assert watching.calls == ["began", "ended"]


def test_a_loader_can_be_pickled_with_its_position():
    loader = prepared(shuffle=True)
    iterator = iter(loader)
    next(iterator)
    copy = pickle.loads(pickle.dumps(loader))
    assert copy.position == loader.position
    rest = list(copy)
    assert torch.equal(torch.cat(rest), torch.cat(list(iterator)))


@pytest.mark.parametrize("even", [True, False])
def test_even_batches_can_be_overridden_for_a_block(even):
    ranks = [prepared(7, DataShard(r, 2), batch_size=2, options=LoaderOptions(even_batches=even)) for r in range(2)]
    sizes = []
    for loader in ranks:
        with loader.override_even_batches(False):
            sizes.append([len(batch) for batch in loader])
        assert [len(batch) for batch in loader][-1] == 2 or not even
    assert sizes == [[2, 2], [2, 1]]


@pytest.mark.parametrize("ranks", range(1, 5))
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("even", [False, True])
@pytest.mark.parametrize("batch_size", range(1, 8))
def test_dropping_what_is_repeated_leaves_every_sample_once(ranks, drop_last, even, batch_size):
    from accel_data import ByIndex, real_counts

    for size in range(1, 41):
        sharding = ByIndex(total=size, batch_size=batch_size, num_ranks=ranks, even=even, drop_last=drop_last)
        kept = []
        for step in range(sharding.steps(0)):
            position = sharding.seek(0, step)
            counts = real_counts(sharding, position, ranks)
            for rank, count in enumerate(counts):
                rows = sharding.rows(position, rank)
                kept += list(rows.positions())[:count] if rows is not None else []
        total = size // (batch_size * ranks) * batch_size * ranks if drop_last else size
        assert kept == list(range(total))


def test_samplers_that_draw_from_global_generators_leave_those_alone():
    class Drawing:
        def __len__(self):
            return 16

        def __iter__(self):
            order = list(range(16))
            random.shuffle(order)
            torch.rand(3)
            yield from order

    # With a generator of its own, the DataLoader does not draw its workers' seed from the global one either.
    loader = prepared(sampler=Drawing(), generator=torch.Generator())
    torch.manual_seed(0)
    random.seed(0)
    expected = torch.rand(1), random.random()
    torch.manual_seed(0)
    random.seed(0)
    next(iter(loader))
    assert (torch.rand(1), random.random()) == expected


@pytest.mark.parametrize("ranks", [1, 2])
def test_one_torch_seed_gives_one_order_and_another_another(ranks):
    def order(seed):
        torch.manual_seed(seed)
        loader = prepared(64, DataShard(0, ranks), shuffle=True, options=LoaderOptions())
        return torch.cat(list(loader)).tolist()

    assert order(42) == order(42)
    assert order(42) != order(43)


def test_the_users_generator_decides_the_order():
    def order(seed, torch_seed):
        torch.manual_seed(torch_seed)
        generator = torch.Generator().manual_seed(seed)
        loader = prepared(64, shuffle=True, generator=generator, options=LoaderOptions())
        return torch.cat(list(loader)).tolist()

    assert order(1, 5) == order(1, 6)
    assert order(1, 5) != order(2, 5)


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_seedable_sampler_decides_the_order_and_is_found_where_it_is_looked_for(ranks):
    def build(torch_seed):
        torch.manual_seed(torch_seed)
        return prepare_data_loader(
            DataLoader(Squares(8), shuffle=True, batch_size=1),
            num_processes=ranks,
            process_index=0,
            use_seedable_sampler=True,
            data_seed=42,
        )

    first, second = build(1), build(2)
    assert isinstance(first.batch_sampler.sampler, SeedableRandomSampler)
    assert isinstance(first.batch_sampler.batch_sampler.sampler, (SeedableRandomSampler, RandomSampler))
    expected = list(SeedableRandomSampler(range(8), data_seed=42))[::ranks]
    assert torch.cat(list(first)).tolist() == torch.cat(list(second)).tolist() == expected


def test_batches_of_one_index_are_not_wrapped_in_lists():
    loader = prepare_loader(DataLoader(Squares(6), batch_size=None), DataShard(1, 2))
    assert [sample.tolist() for sample in loader] == [1, 3, 5]


def test_a_batch_sampler_given_as_sampler_is_sharded():
    from torch.utils.data import BatchSampler, SequentialSampler

    class Fetching(Squares):
        def __getitem__(self, indices):
            return torch.tensor(indices)

    sampler = BatchSampler(SequentialSampler(range(12)), 3, False)
    loader = prepare_loader(DataLoader(Fetching(12), sampler=sampler, batch_size=None), DataShard(1, 2))
    assert [batch.tolist() for batch in loader] == [[3, 4, 5], [9, 10, 11]]


def test_dispatching_needs_a_device():
    with pytest.raises(ValueError, match="put_on_device=True"):
        prepare_data_loader(DataLoader(Squares()), dispatch_batches=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"global_batch_size": 0}, "at least 1"),
        ({"global_batch_size": 8, "split_batches": True}, "give only global_batch_size"),
        ({"sharding": "row"}, "'index', 'node' or a function"),
        ({"sharding": "node", "split_batches": True}, "needs sharding='index'"),
        ({"num_nodes": 0}, "num_nodes is 0"),
    ],
)
def test_options_that_exclude_each_other_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        LoaderOptions(**options)


@pytest.mark.parametrize(
    ("options", "kwargs", "message"),
    [
        ({"global_batch_size": 8}, {"batch_sampler": [[0, 1]], "batch_size": 1}, "list already makes them"),
        ({"sharding": "node"}, {"sampler": [0, 1]}, "list has to be walked"),
        ({"sharding": "node"}, {"sampler": RandomSampler(range(4), replacement=True)}, "'replacement'"),
    ],
)
def test_options_that_a_loader_cannot_have_are_refused(options, kwargs, message):
    with pytest.raises(ConfigError, match=message):
        prepared(options=LoaderOptions(**options), **kwargs)


def test_length_is_unknown_when_the_sampler_has_none():
    class Unsized:
        def __iter__(self):
            return iter(range(10))

    loader = prepared(sampler=Unsized())
    with pytest.raises(TypeError, match="number of batches is unknown"):
        len(loader)
    assert [loader.batches_left for _ in loader] == [None, None, 0]
    assert loader.end_of_dataloader


def test_plain_loaders_are_skipped_into_plain_loaders():
    loader = skip_first_batches(DataLoader(range(16), batch_size=4), 2)
    assert type(loader) is DataLoader
    assert [batch.tolist() for batch in loader] == [[8, 9, 10, 11], [12, 13, 14, 15]]
    assert len(loader) == 2


def test_skipping_keeps_the_epoch_and_ends_on_the_last_batch():
    loader = prepared()
    loader.set_epoch(1)
    skipped = skip_first_batches(loader, 2)
    assert skipped.iteration == 1
    assert [skipped.end_of_dataloader for _ in skipped] == [False, True]


class Stream(IterableDataset):
    def __iter__(self):
        return iter(torch.arange(24))


def in_order(dataset, workers=0, **options):
    options = LoaderOptions(data_seed=1, **options)
    return prepare_loader(DataLoader(dataset, batch_size=4, num_workers=workers), ALONE, options=options)


@pytest.mark.parametrize(
    "make",
    [
        lambda: DataLoader(Squares(24), batch_size=4),
        lambda: DataLoader(Stream(), batch_size=4),
        lambda: in_order(Squares(24)),
        lambda: in_order(Squares(24), dispatch_batches=True),
        lambda: in_order(Stream()),
        lambda: in_order(Stream(), workers=1),
    ],
    ids=["plain", "plain stream", "map", "dispatched", "stream", "worker"],
)
def test_skips_add_up(make):
    loader = make()
    skipped = skip_first_batches(skip_first_batches(loader, 1), 2)
    assert [batch.tolist() for batch in skipped] == [list(range(start, start + 4)) for start in (12, 16, 20)]
    if isinstance(loader, PreparedLoader):
        assert (loader.epoch, len(list(loader))) == (1, 6)


def test_totals_are_those_of_all_ranks():
    loader = prepared(15, DataShard(0, 3))
    assert (loader.total_batch_size, loader.total_dataset_length) == (12, 15)
    split = prepared(15, DataShard(0, 2), options=LoaderOptions(split_batches=True))
    assert split.total_batch_size == 4


class Tracing:
    """A placer that notes when a batch sets out and when it is taken."""

    def __init__(self):
        self.events = []

    def start(self, batch):
        self.events.append(("start", batch[0].item()))
        return Traced(self, batch)


class Traced:
    def __init__(self, tracing, batch):
        self.tracing, self.batch = tracing, batch

    def take(self):
        self.tracing.events.append(("take", self.batch[0].item()))
        return self.batch


def traced(**kwargs):
    tracing = Tracing()
    loader = PreparedLoader(prepared(12, **kwargs)._source, options=LoaderOptions(), placer=tracing)
    assert [loader.end_of_dataloader for _ in loader] == [False, False, True]
    return tracing.events


@pytest.mark.parametrize("kwargs", [{}, {"sampler": range(12)}])
def test_the_next_batch_of_a_worker_sets_out_before_the_current_one_is_handed_out(kwargs):
    expected = [("start", 0), ("start", 4), ("take", 0), ("start", 8), ("take", 4), ("take", 8)]
    assert traced(num_workers=1, **kwargs) == expected


@pytest.mark.parametrize(
    "kwargs", [{}, {"sampler": range(12)}, {"batch_sampler": [range(4), range(4, 8), range(8, 12)], "batch_size": 1}]
)
def test_a_batch_read_in_this_process_is_read_when_the_loop_wants_it(kwargs):
    """Otherwise the random draws of the dataset would come before those of the step, and be lost by a resume."""
    expected = [(event, first) for first in (0, 4, 8) for event in ("start", "take")]
    assert traced(**kwargs) == expected


def test_what_was_started_but_not_handed_out_is_not_delivered():
    loader = prepare_loader(DataLoader(Squares(), batch_size=4), ALONE, device=torch.device("meta"))
    batch = next(iter(loader))
    assert batch.device.type == "meta"
    assert loader.position.samples == 4


DYING = """
import os
from torch.utils.data import DataLoader, Dataset
from accel_data import prepare_loader
from accel_state.parallelism.config import DataShard

class Dying(Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, index):
        return os._exit(3) if index == 9 else index

loader = prepare_loader(DataLoader(Dying(), batch_size=4, num_workers=1), DataShard(0, 1))
try:
    list(loader)
except Exception as error:
    print(type(error).__name__, error, "POSITION", loader.position.samples)
"""


@pytest.mark.fault
def test_a_worker_that_dies_is_an_error_and_the_position_is_where_it_was():
    # In a process of its own, for torch's handler of SIGCHLD may raise the same once more, at any line of pytest's.
    done = subprocess.run([sys.executable, "-c", DYING], capture_output=True, text=True, timeout=60)
    assert re.match(r"(DataError 1 of the DataLoader's 1 workers died|RuntimeError .*exited unexpectedly)", done.stdout)
    assert int(done.stdout.split("POSITION")[1]) in (0, 4, 8)


@pytest.mark.parametrize(("pids", "expected"), [("7, {own}", DataError), ("7", RuntimeError)])
def test_a_death_that_torch_alone_has_seen_is_an_error_of_the_loader_whose_worker_it_was(monkeypatch, pids, expected):
    kind = torch.utils.data.dataloader._MultiProcessingDataLoaderIter
    read, calls = kind._next_data, []

    def raising(self):
        calls.append(self)
        if len(calls) == 3:
            named = pids.format(own=self._workers[0].pid)
            raise RuntimeError(f"DataLoader worker (pid(s) {named}) exited unexpectedly")
        return read(self)

    monkeypatch.setattr(kind, "_next_data", raising)
    loader = prepare_loader(DataLoader(Squares(), batch_size=4, num_workers=1), ALONE)
    with pytest.raises(expected, match="exited unexpectedly") as caught:
        list(loader)
    assert ("one of the DataLoader's workers died" in str(caught.value)) == (expected is DataError)
    assert loader.position.samples == 8
    assert not calls[0]._workers[0].is_alive()


class Failing(Squares):
    def __getitem__(self, index):
        raise ConnectionError("the disk is far away")


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_error_of_the_dataset_stays_that_error(num_workers):
    with pytest.raises(ConnectionError, match="the disk is far away"):
        list(prepare_loader(DataLoader(Failing(), num_workers=num_workers), ALONE))


@pytest.mark.parametrize("persistent", [False, True])
def test_workers_end_with_a_pass_that_an_error_ends(monkeypatch, persistent):
    """Those of a loader that keeps its workers serve the next pass."""
    kind = torch.utils.data.dataloader._MultiProcessingDataLoaderIter
    read, iterators = kind._next_data, []
    monkeypatch.setattr(kind, "_next_data", lambda self: iterators.append(self) or read(self))
    loader = prepare_loader(DataLoader(Failing(), num_workers=2, persistent_workers=persistent), ALONE)
    for _ in range(2):
        with pytest.raises(ConnectionError, match="the disk is far away"):
            list(loader)
        assert [worker.is_alive() for worker in iterators[-1]._workers] == [persistent] * 2
    assert (iterators[0] is iterators[-1]) == persistent
    iterators[-1]._shutdown_workers()


def test_a_subclass_that_gives_other_batches_than_its_sampler_still_knows_its_last():
    class Filtering(DataLoader):
        def __iter__(self):
            return (batch for batch in super().__iter__() if batch[0] != 4)

    loader = prepare_loader(Filtering(Squares(), batch_size=4), ALONE)
    assert [(batch[0].item(), loader.end_of_dataloader) for batch in loader] == [(0, False), (8, False), (12, True)]


def test_a_samplers_batches_cannot_be_had_past_the_loader():
    with pytest.raises(DataError, match="iterate the loader"):
        iter(prepared().batch_sampler)


class KeepsAnIterator(DataLoader):
    """Keeps its workers alive in the way that was usual before torch had persistent workers."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.kept = super().__iter__()

    def __iter__(self):
        return (next(self.kept) for _ in range(len(self)))


def test_a_loader_that_keeps_an_iterator_over_all_data_is_refused_on_several_ranks():
    shared = prepare_loader(
        KeepsAnIterator(Squares(), batch_size=4), DataShard(1, 2), options=LoaderOptions(data_seed=1)
    )
    with pytest.raises(DataError, match=r"KeepsAnIterator.__iter__ gave a batch.*persistent_workers=True"):
        list(shared)
    assert len(list(prepare_loader(KeepsAnIterator(Squares(), batch_size=4), ALONE))) == 4


def test_a_subclass_that_reads_further_ahead_knows_where_it_is():
    class Ahead(DataLoader):
        def __iter__(self):
            return iter(list(super().__iter__()))

    loader = prepare_loader(
        Ahead(Squares(24), batch_sampler=[[i, i + 1] for i in range(0, 24, 2)]),
        DataShard(0, 2),
        options=LoaderOptions(data_seed=1),
    )
    assert [(batch.tolist(), loader.position.samples) for batch in loader] == [
        ([i, i + 1], i + 4) for i in range(0, 24, 4)
    ]


def test_the_epoch_is_set_where_a_script_finds_the_batch_sampler():
    class Numbered:
        epoch = 0

        def set_epoch(self, epoch):
            self.epoch = epoch

        def __iter__(self):
            return iter([[self.epoch]])

    loader = prepare_loader(DataLoader(range(9), batch_sampler=Numbered(), collate_fn=list), ALONE)
    loader.batch_sampler.set_epoch(3)
    assert (list(loader), loader.epoch) == ([[3]], 4)
    assert not hasattr(prepared().batch_sampler, "set_epoch")


def test_seeds_of_numpy_are_seeds():
    numpy_seed, seed = (LoaderOptions(data_seed=kind(3)) for kind in (np.int64, int))
    ours, theirs = prepared(shuffle=True, options=numpy_seed), prepared(shuffle=True, options=seed)
    assert json.loads(json.dumps(ours.state_dict())) == theirs.state_dict()
    assert torch.cat(list(ours)).equal(torch.cat(list(theirs)))
    sampler = DistributedSampler(Squares(), num_replicas=1, rank=0, seed=np.int64(3))
    assert torch.cat(list(prepared(sampler=sampler, options=LoaderOptions()))).unique().numel() == 16


def test_a_random_subset_may_have_keys_that_are_no_numbers():
    keys = SubsetRandomSampler(["a", "b", "c"])
    loader = prepare_loader(DataLoader({"a": 1, "b": 2, "c": 3}, batch_size=2, sampler=keys, collate_fn=list), ALONE)
    assert sorted(number for batch in loader for number in batch) == [1, 2, 3]

"""A saved position resumes at the next undelivered sample, whatever the ranks, workers and batches were."""

import copy
import json
import random
import time
import warnings
from itertools import chain, zip_longest
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    SubsetRandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)

from accel_data import Cursor, LengthGrouped, LoaderOptions, OrderSampler, prepare_loader, skip_first_batches
from accel_state.errors import DataError, DataStateError
from accel_state.parallelism.config import DataShard


class Walked:
    """A sampler that shuffles with torch's global generator and says nothing about it."""

    def __init__(self, size):
        self.size = size

    def __iter__(self):
        return iter(torch.randperm(self.size).tolist())

    def __len__(self):
        return self.size


class Ragged:
    """A batch sampler whose batches have 1, 2, 3, 1, 2, 3, ... samples."""

    def __init__(self, size):
        self.size = size

    def __iter__(self):
        order, first, width = torch.randperm(self.size).tolist(), 0, 1
        while first < self.size:
            yield order[first : first + width]
            first, width = first + width, width % 3 + 1

    def __len__(self):
        return sum(1 for _ in self)


class InBatches:
    """A batch sampler over a sampler, of which only its owner knows what it does."""

    def __init__(self, sampler):
        self.sampler = sampler

    def __iter__(self):
        return iter(torch.tensor(list(self.sampler)).view(-1, 4).tolist())

    def __len__(self):
        return len(self.sampler) // 4


class Segment(NamedTuple):
    """One run of a job: how it reads and after how many steps it is stopped."""

    ranks: int
    batch_size: int
    mode: str
    stop: int
    workers: int = 0


class Job(NamedTuple):
    size: int
    kind: str
    even: bool
    drop_last: bool
    epoch: int
    segments: list[Segment]


KINDS = ["sequential", "shuffled", "subset", "length_grouped", "walked", "ragged"]


NO_WORKERS = st.just(0)
ANY_WORKERS = st.sampled_from([0, 1, 2])


@st.composite
def jobs(draw, workers=NO_WORKERS):
    segments = [
        Segment(
            draw(st.integers(1, 5)),
            draw(st.integers(1, 7)),
            draw(st.sampled_from(["index", "split", "elastic"])),
            draw(st.integers(0, 12)),
            draw(workers),
        )
        for _ in range(draw(st.integers(1, 4)))
    ]
    return Job(
        draw(st.integers(1, 70)),
        draw(st.sampled_from(KINDS)),
        draw(st.booleans()),
        draw(st.booleans()),
        draw(st.integers(0, 3)),
        segments,
    )


def make_sampling(job, batch_size):
    """The arguments that say what a DataLoader of the job reads."""
    if job.kind == "ragged":
        return {"batch_sampler": Ragged(job.size)}
    samplers = {
        "subset": lambda: SubsetRandomSampler(range(job.size)),
        "length_grouped": lambda: OrderSampler(LengthGrouped(range(job.size), group_size=4, pool=3), seed=11),
        "walked": lambda: Walked(job.size),
    }
    common = {"batch_size": batch_size, "drop_last": job.drop_last}
    if job.kind in samplers:
        return {**common, "sampler": samplers[job.kind]()}
    return {**common, "shuffle": job.kind == "shuffled"}


def make_loaders(job, segment):
    batch_size, extra = segment.batch_size, {}
    if segment.mode == "split" and job.kind != "ragged":
        batch_size, extra = batch_size * segment.ranks, {"split_batches": True}
    elif segment.mode == "elastic" and job.kind != "ragged":
        extra = {"global_batch_size": 12}
    return [
        prepare_loader(
            DataLoader(range(job.size), collate_fn=list, num_workers=segment.workers, **make_sampling(job, batch_size)),
            DataShard(rank, segment.ranks),
            options=LoaderOptions(even_batches=job.even, data_seed=7, **extra),
        )
        for rank in range(segment.ranks)
    ]


def run(loaders, stop=None):
    """Real samples delivered in the next ``stop`` steps, rank after rank, and the state they end in."""
    delivered, states = [], [loader.state_dict() for loader in loaders]
    passes = [iter(loader) for loader in loaders]
    steps = 0
    while stop is None or steps < stop:
        batches = [next(one, None) for one in passes]
        if all(batch is None for batch in batches):
            break
        steps += 1
        counts = loaders[0].real_counts
        for batch, count in zip_longest(batches, counts):
            assert (batch is None) == (count == -1)
            delivered += batch[: max(count, 0)] if batch is not None else []
        states = [loader.state_dict() for loader, batch in zip(loaders, batches, strict=True) if batch is not None]
        assert all(state == states[0] for state in states)
    else:
        # A stop is in the middle of the loop: nobody has seen the end of the epoch yet.
        return delivered, json.loads(json.dumps(states[0]))
    return delivered, json.loads(json.dumps(loaders[0].state_dict()))


def over(loaders, epoch):
    """Whether what was left of an epoch was nothing, which all ranks must agree on."""
    (found,) = {loader.epoch for loader in loaders}
    return found != epoch


def check(job):
    whole = job._replace(drop_last=False)
    reference = make_loaders(whole, Segment(1, 1, "index", 0))[0]
    reference.set_epoch(job.epoch)
    order = list(chain.from_iterable(reference))
    assert sorted(order) == list(range(job.size))

    state, delivered, last = None, [], job.segments[0]
    for segment in [*job.segments, job.segments[-1]._replace(stop=None)]:
        loaders = make_loaders(job, segment)
        for loader in loaders:
            if state is None:
                loader.set_epoch(job.epoch)
            else:
                loader.load_state_dict(state)
        if over(loaders, job.epoch):
            break
        last = segment
        part, state = run(loaders, segment.stop)
        delivered += part
        if state["epoch"] != job.epoch:
            break
    assert delivered == order[: len(delivered)]
    if not job.drop_last:
        assert delivered == order
    else:
        # Either those who read last came to the end, or it is one for those who went on.
        step = max(12, *(max(one.batch_size, 3) * one.ranks for one in (last, segment)))
        assert len(delivered) > job.size - step
    assert loaders[0].position == Cursor(job.epoch + 1)


@settings(max_examples=200, deadline=None)
@given(jobs())
def test_every_sample_is_delivered_exactly_once_in_order_through_any_chain_of_resumes(job):
    check(job)


@settings(max_examples=5, deadline=None)
@given(jobs(workers=ANY_WORKERS))
def test_chains_of_resumes_with_changing_workers(job):
    check(job)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@settings(max_examples=150, deadline=None)
@given(jobs(workers=ANY_WORKERS))
def test_many_chains_of_resumes_with_changing_workers(job):
    check(job)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@settings(max_examples=4000, deadline=None)
@given(jobs())
def test_every_sample_is_delivered_exactly_once_in_thousands_of_chains(job):
    check(job)


def loader_of(size=24, rank=0, ranks=1, *, options=None, **kwargs):
    kwargs.setdefault("batch_size", 4)
    kwargs.setdefault("collate_fn", list)
    options = options or LoaderOptions(data_seed=3)
    return prepare_loader(DataLoader(range(size), **kwargs), DataShard(rank, ranks), options=options)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("sampling", [{"shuffle": False}, {"shuffle": True}], ids=["in order", "shuffled"])
def test_a_long_epoch_goes_on_anywhere_as_it_would_have_gone_on(sampling, ranks):
    """Indices are computed for more and more batches at a time, which shows nowhere."""
    passes = [loader_of(20_011, rank, ranks, batch_size=32, **sampling) for rank in range(ranks)]
    delivered = [list(loader) for loader in passes]
    assert {index for batches in delivered for batch in batches for index in batch} == set(range(20_011))
    for loader, whole in zip(passes, delivered, strict=True):
        for start in (1, 2, 40, 200, len(whole) - 1):
            loader.load_state_dict({**loader.state_dict(), "epoch": 0, "samples": start * 32 * ranks})
            assert list(loader) == whole[start:]


def shuffled_by(library, size):
    if library == "torch":
        return torch.randperm(size).tolist()
    if library == "random":
        return random.sample(range(size), size)
    return np.random.permutation(size).tolist()


class InParts:
    """Shuffles half of the dataset, and the other half when it comes to it: two random samplers in a row."""

    def __init__(self, size, library):
        self.size, self.library = size, library

    def __iter__(self):
        half = self.size // 2
        yield from shuffled_by(self.library, half)
        yield from (half + index for index in shuffled_by(self.library, half))

    def __len__(self):
        return self.size


@pytest.mark.parametrize("library", ["torch", "random", "numpy"])
@pytest.mark.parametrize("whole", [False, True])
def test_a_sampler_that_draws_again_inside_an_epoch_draws_the_same_everywhere(library, whole):
    def prepared(rank):
        sampler = InParts(24, library)
        sampling = (
            {"batch_sampler": BatchSampler(sampler, 4, False), "batch_size": 1} if whole else {"sampler": sampler}
        )
        return loader_of(24, rank, 2, **sampling)

    def seeded(number):
        torch.manual_seed(number)
        random.seed(number)
        np.random.seed(number)

    def interleaved():
        """Both ranks' batches, each rank with global generators that its model draws from."""
        passes = [iter(prepared(rank)) for rank in range(2)]
        for step in range(3):
            for rank, one in enumerate(passes):
                seeded(10 * step + rank)
                yield next(one)
                assert random.random() == random.Random(10 * step + rank).random()

    batches = list(interleaved())
    assert sorted(index for batch in batches for index in batch) == list(range(24))
    loader = prepared(0)
    next(iter(loader))
    resumed = prepared(0)
    resumed.load_state_dict(loader.state_dict())
    seeded(99)
    assert list(resumed) == batches[2::2]


def test_state_before_the_start_starts_at_the_start():
    other = loader_of(shuffle=True)
    other.load_state_dict(loader_of(shuffle=True).state_dict())
    assert list(other) == list(loader_of(shuffle=True))


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("ranks", [1, 3])
def test_state_at_the_last_batch_of_an_epoch_goes_on_with_the_next(drop_last, ranks):
    """So a script that counts epochs, and is saved behind the last batch, trains as many as it would have."""
    options = {"shuffle": True, "drop_last": drop_last}
    loader = loader_of(25, 0, ranks, **options)
    for _ in loader:
        state = loader.state_dict()
    assert state["epoch"] == 0
    resumed = loader_of(25, 0, ranks, **options)
    resumed.load_state_dict(state)
    assert resumed.epoch == 1
    assert list(resumed) == list(loader)


@pytest.mark.parametrize("sampler", [Walked, lambda size: Remembering(size)])
@pytest.mark.parametrize("counted", [True, False])
def test_an_epoch_of_a_sampler_of_the_user_that_has_ended_is_followed_by_the_next(sampler, counted):
    """However the script counts: one that names the epoch it was saved in finds nothing left of that."""
    loader, resumed = (loader_of(sampler=sampler(24)) for _ in range(2))
    for _ in loader:
        state = json.loads(json.dumps(loader.state_dict()))
    resumed.load_state_dict(state)
    if counted:
        resumed.set_epoch(0)
        assert list(resumed) == []
        resumed.set_epoch(1)
    assert list(resumed) == list(loader)
    assert (resumed.epoch, loader.epoch) == (2, 2)


@pytest.mark.parametrize("extra", [{"shuffle": True}, {"sampler": Walked(24)}, {"batch_sampler": Ragged(24)}])
def test_a_pass_that_is_broken_out_of_is_followed_by_another_order(extra):
    """As with torch's loader; a run that resumes behind the break reads the rest first."""
    loader, resumed, whole = (
        loader_of(**dict(extra, **({"batch_size": 1} if "batch_sampler" in extra else {}))) for _ in range(3)
    )
    first, second = list(whole), list(whole)
    for number, _ in enumerate(loader):
        if number == 1:
            break
    resumed.load_state_dict(json.loads(json.dumps(loader.state_dict())))
    assert list(loader) == second
    assert list(resumed) == first[2:]
    assert list(resumed) == second


def test_epochs_limited_by_a_break_see_all_of_the_data():
    loader, seen = loader_of(1000, batch_size=10, shuffle=True), set()
    for _ in range(10):
        for number, batch in enumerate(loader, 1):
            seen.update(batch)
            if number == 10:
                break
    assert len(seen) > 550  # 651 are expected


def test_a_pass_in_a_pass_leaves_the_position_where_it_is():
    loader, whole, resumed = (loader_of(shuffle=True) for _ in range(3))
    expected = list(whole)
    for number, batch in enumerate(loader):
        assert batch == expected[number]
        position, state = loader.position, loader.state_dict()
        if number in (1, 2):
            assert list(loader) == expected
        if number == 3:
            for _ in loader:
                break
        assert (loader.position, loader.state_dict()) == (position, state)
        if number == 3:
            resumed.load_state_dict(state)
    assert list(resumed) == expected[4:]
    assert loader.epoch == resumed.epoch == 1


class Drawing:
    """A batch sampler that draws each batch, from a generator of its own, when it is asked for it."""

    batch_size = 4

    def __init__(self):
        self.generator = torch.Generator()

    def __iter__(self):
        return (torch.randperm(120, generator=self.generator)[:4].tolist() for _ in range(30))

    def __len__(self):
        return 30


class Advancing(Drawing):
    """Its state is where it stands, which each batch moves on."""

    def __init__(self):
        self.number = 0

    def __iter__(self):
        for _ in range(30):
            self.number += 1
            yield [self.number % 120]

    def state_dict(self):
        return {"number": self.number}

    def load_state_dict(self, state):
        self.number = state["number"]


@pytest.mark.parametrize("inside", ["pass", "skip"])
@pytest.mark.parametrize(
    "extra",
    [
        lambda: {"batch_sampler": Drawing(), "batch_size": 1},
        lambda: {"batch_sampler": Advancing(), "batch_size": 1},
        lambda: {"shuffle": True, "num_workers": 1, "persistent_workers": True},
    ],
    ids=["generator", "state", "persistent workers"],
)
def test_passes_and_skips_in_a_pass_change_nothing_that_it_reads(extra, inside):
    loader, whole = loader_of(120, **extra()), loader_of(120, **extra())
    expected, following = list(whole), list(whole)
    delivered = []
    for batch in loader:
        delivered.append(batch)
        if len(delivered) in (2, 5):  # behind a nested pass there is another
            assert inside == "skip" or list(loader) == expected
            skip_first_batches(loader, 1)
    assert delivered == expected
    assert list(loader) == following


def test_an_epoch_that_is_read_again_after_a_break_leads_to_the_next():
    loader, whole = (loader_of(120, batch_sampler=Advancing(), batch_size=1) for _ in range(2))
    for _ in loader:
        break
    loader.set_epoch(0)
    assert list(loader) == list(whole)
    assert list(loader) == list(whole)


def test_an_iterator_that_is_kept_after_a_look_at_the_data_is_no_pass_of_the_run():
    loader = loader_of(shuffle=True)
    kept = iter(loader)
    next(kept)
    list(loader)
    for _ in loader:  # the second pass in a row, so the first is not around it
        assert loader.position.samples == 4
        break
    assert loader.position == Cursor(1, 4)


def test_an_epoch_chosen_on_the_sampler_is_read():
    datasets = [range(24)] * 2
    loader, whole = (
        prepare_loader(
            DataLoader(data, 4, sampler=DistributedSampler(data, 1, 0, seed=3), collate_fn=list),
            DataShard(),
            options=LoaderOptions(),
        )
        for data in datasets
    )
    epochs = [list(whole) for _ in range(3)]
    assert epochs[0] != epochs[1] != epochs[2]
    loader.sampler.set_epoch(2)
    assert list(loader) == epochs[2]
    loader.sampler.set_epoch(0)
    assert list(loader) == epochs[0]
    assert list(loader) == epochs[1]


@pytest.mark.parametrize("ended", [0, 1])
def test_a_script_that_counts_epochs_on_the_sampler_reads_nothing_of_one_that_had_ended(ended):
    loader, resumed = (loader_of(sampler=DistributedSampler(range(24), 1, 0, seed=3)) for _ in range(2))
    epochs = []
    for epoch in range(4):
        loader.sampler.set_epoch(epoch)
        epochs.append([])
        for batch in loader:
            epochs[-1].append(batch)
            if epoch == ended:
                state = loader.state_dict()
    resumed.load_state_dict(state)
    for epoch in range(ended, 4):
        resumed.sampler.set_epoch(epoch)
        assert list(resumed) == ([] if epoch == ended else epochs[epoch])


def test_a_state_that_was_loaded_is_saved_again_as_it_was():
    loader = loader_of(sampler=Remembering(24))
    passing = iter(loader)
    next(passing)
    state = json.loads(json.dumps(loader.state_dict()))
    rest = list(passing)
    first, second = (loader_of(sampler=Remembering(24)) for _ in range(2))
    first.load_state_dict(state)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert list(second) == rest


@pytest.mark.parametrize("extra", [{"shuffle": True}, {"sampler": Walked(24)}])
def test_a_load_that_is_undone_in_a_loop_leaves_it_counting(extra):
    loader, whole, resumed = (loader_of(**extra) for _ in range(3))
    expected = list(whole)
    other = {**whole.state_dict(), "epoch": 7, "samples": 8}
    for number, _ in enumerate(loader):
        if number == 1:
            undo = loader.undo()
            loader.load_state_dict(other)
            assert loader.position == Cursor(7, 8)
            undo()
        if number == 3:
            resumed.load_state_dict(loader.state_dict())
    assert list(resumed) == expected[4:]
    assert loader.epoch == 1


def test_a_pass_whose_rest_is_of_no_use_is_not_resumed():
    loader, resumed = loader_of(), loader_of()
    for _ in loader:
        loader.disclaim()
        break
    resumed.load_state_dict(loader.state_dict())
    assert [batch[0] for batch in resumed] == [0, 4, 8, 12, 16, 20]


def test_state_after_the_loop_begins_the_next_epoch():
    loader = loader_of(shuffle=True)
    list(loader)
    state = loader.state_dict()
    second = list(loader)
    resumed = loader_of(shuffle=True)
    resumed.load_state_dict(state)
    assert list(resumed) == second


def test_setting_the_epoch_it_is_in_keeps_a_resumed_position():
    loader = loader_of()
    loader.load_state_dict({**loader.state_dict(), "epoch": 2, "samples": 8})
    loader.set_epoch(2)
    assert next(iter(loader))[0] == 8


def test_setting_another_epoch_starts_that_one():
    loader = loader_of()
    loader.load_state_dict({**loader.state_dict(), "epoch": 2, "samples": 8})
    loader.set_epoch(3)
    assert loader.position == Cursor(3, 0)


def test_several_loaders_in_flight_keep_their_own_positions():
    first, second = loader_of(shuffle=True), loader_of(12, batch_size=3)
    one, two = iter(first), iter(second)
    next(one), next(two), next(one)
    assert (first.position.samples, second.position.samples) == (8, 3)


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("extra", [{}, {"persistent_workers": True}, {"prefetch_factor": 4}])
@pytest.mark.sampled(2)
def test_what_workers_have_read_ahead_is_not_counted(workers, extra):
    expected = list(loader_of(40, shuffle=True))
    loader = loader_of(40, shuffle=True, num_workers=workers, **extra)
    passing = iter(loader)
    delivered = [next(passing) for _ in range(3)]
    state = loader.state_dict()
    del passing
    resumed = loader_of(40, shuffle=True, num_workers=workers, **extra)
    resumed.load_state_dict(state)
    assert delivered + list(resumed) == expected
    if extra:
        assert len(list(resumed)) == 10


class SlowStart(Dataset):
    """Its first batch takes until the second worker has read its own, and until it is ``released``."""

    def __init__(self, *, released):
        self.read = torch.zeros(40, dtype=torch.bool).share_memory_()
        self.released = torch.tensor([released]).share_memory_()

    def __len__(self):
        return len(self.read)

    def __getitem__(self, index):
        deadline = time.monotonic() + 60
        while index == 0 and not (self.released and self.read[4:8].all()) and time.monotonic() < deadline:
            time.sleep(0.001)
        self.read[index] = True
        return index


class SlowStream(SlowStart, IterableDataset):
    def __iter__(self):
        seat = get_worker_info().id
        return (self[index] for index in range(40) if index // 4 % 2 == seat)


class Augmented(Dataset):
    def __len__(self):
        return 12

    def __getitem__(self, index):
        return index, torch.rand(()).item()


class AugmentedStream(IterableDataset):
    def __iter__(self):
        return ((index, torch.rand(()).item()) for index in range(12))


@pytest.mark.parametrize("dataset", [Augmented(), AugmentedStream()], ids=["map", "stream"])
def test_a_script_that_seeds_torch_inside_an_epoch_changes_no_draw_of_its_workers(dataset):
    def make():
        return prepare_loader(DataLoader(dataset, 2, num_workers=1, collate_fn=list), DataShard())

    def saved(loader):
        return json.loads(json.dumps(loader.state_dict())), torch.get_rng_state()

    def resumed(state, generator):
        loader = make()
        loader.load_state_dict(state)
        torch.set_rng_state(generator)
        return loader

    torch.manual_seed(1)
    loader, delivered = make(), []
    for batch in loader:
        delivered.append(batch)
        if len(delivered) == 2:
            torch.manual_seed(2)
            first = saved(loader)
    following = list(loader)
    second = resumed(*first)
    for batch in second:
        assert batch == delivered[2]
        break
    last = resumed(*saved(second))
    assert list(last) == delivered[3:]
    assert list(last) == following


@pytest.mark.parametrize("dataset", [SlowStart, SlowStream])
def test_batches_come_in_order_where_the_loader_would_let_them_overtake(dataset):
    loader = DataLoader(dataset(released=False), batch_size=4, num_workers=2, in_order=False, collate_fn=list)
    batches = iter(loader)
    assert next(batches)[0] == 4
    loader.dataset.released.fill_(True)
    loader = DataLoader(dataset(released=True), batch_size=4, num_workers=2, in_order=False, collate_fn=list)
    with pytest.warns(RuntimeWarning, match=r"in_order=False is not followed.*prefetch_factor \(now 2\)"):
        prepared = prepare_loader(loader, DataShard(0, 1))
    assert next(iter(prepared))[0] == 0
    assert (prepared.state_dict()["samples"], prepared.in_order, loader.in_order) == (4, True, False)


@pytest.mark.parametrize(("workers", "in_order"), [(0, True), (1, False), (2, True)])
def test_a_loader_that_keeps_the_order_is_left_as_it_is(workers, in_order):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert loader_of(num_workers=workers, in_order=in_order).in_order == in_order


def test_seed_of_the_state_wins_over_the_seed_of_the_new_run():
    loader = loader_of(shuffle=True, options=LoaderOptions(data_seed=1))
    passing = iter(loader)
    first = next(passing)
    resumed = loader_of(shuffle=True, options=LoaderOptions(data_seed=2))
    resumed.load_state_dict(loader.state_dict())
    assert first + list(chain.from_iterable(resumed)) == list(
        chain.from_iterable(loader_of(shuffle=True, options=LoaderOptions(data_seed=1)))
    )


def test_weighted_draws_are_resumed():
    def make():
        return loader_of(sampler=WeightedRandomSampler([1.0, 2.0, 3.0] * 8, 20))

    expected, loader, resumed = list(make()), make(), make()
    next(iter(loader))
    resumed.load_state_dict(loader.state_dict())
    assert list(resumed) == expected[1:]


class Remembering(Walked):
    """A sampler with a state: each pass shuffles on from where the one before ended."""

    def __init__(self, size):
        super().__init__(size)
        self.state = torch.Generator().manual_seed(5)

    def __iter__(self):
        return iter(torch.randperm(self.size, generator=self.state).tolist())

    def state_dict(self):
        return {"words": self.state.get_state().tolist()}

    def load_state_dict(self, state):
        self.state.set_state(torch.tensor(state["words"], dtype=torch.uint8))


class Live(Remembering):
    """Its state is an object that it changes as it is read, and takes over when it is loaded."""

    def __init__(self, size):
        super().__init__(size)
        self.state = {"passes": 0}

    def __iter__(self):
        self.state["passes"] += 1
        return iter(torch.randperm(self.size, generator=torch.Generator().manual_seed(self.state["passes"])).tolist())

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


@pytest.mark.parametrize("stop", [0, 2])
def test_a_sampler_may_change_the_state_that_it_has_returned_or_loaded(stop):
    loader = loader_of(sampler=Live(24))
    list(loader)
    passing = iter(loader)
    for _ in range(stop):
        next(passing)
    state = loader.state_dict()
    rest, following = list(passing), list(loader)
    for _ in range(2):
        resumed = loader_of(sampler=Live(24))
        resumed.load_state_dict(state)
        assert list(resumed) == rest
        assert list(resumed) == following


@pytest.mark.parametrize("passes", [0, 1])
@pytest.mark.parametrize("stop", [0, 2])
def test_a_sampler_with_a_state_of_its_own_is_resumed(passes, stop):
    loader = loader_of(sampler=Remembering(24))
    for _ in range(passes):
        list(loader)
    passing = iter(loader)
    for _ in range(stop):
        next(passing)
    state = json.loads(json.dumps(loader.state_dict()))
    rest = list(passing)
    resumed = loader_of(sampler=Remembering(24))
    resumed.load_state_dict(state)
    assert list(resumed) == rest
    assert list(resumed) == list(loader)


@pytest.mark.parametrize("skip", [0, 1, 5, 6, 9])
@pytest.mark.parametrize("extra", [{"shuffle": True}, {"sampler": Walked(24)}, {"batch_sampler": Ragged(24)}])
def test_skipping_keeps_what_comes_after_and_later_epochs_whole(skip, extra):
    if "batch_sampler" in extra:
        extra = {**extra, "batch_size": 1}
    loader, other = loader_of(**extra), loader_of(**extra)
    skipped = skip_first_batches(other, skip)
    expected = list(loader)[skip:]
    assert len(skipped) == len(expected)
    assert list(skipped) == expected
    assert list(skipped) == list(loader)


@pytest.mark.parametrize("restored", [True, False])
@pytest.mark.parametrize("stop", [1, 3, 5])
def test_a_loader_moves_along_with_one_that_skips_a_part_of_it(restored, stop):
    """The way of scripts that count batches themselves: skip in the first epoch, then iterate the loader."""
    loader, other = loader_of(shuffle=True), loader_of(shuffle=True)
    first = iter(loader)
    read = [next(first) for _ in range(stop)]
    if restored:
        other.load_state_dict(loader.state_dict())
    whole, later = read + list(first), list(loader)
    skipped = skip_first_batches(other, stop)
    assert list(skipped) == whole[stop:]
    assert list(other) == later
    assert other.position == loader.position


def test_a_loader_is_saved_where_one_that_skips_a_part_of_it_is():
    loader, other, third = (loader_of(shuffle=True) for _ in range(3))
    expected = list(loader)
    for number, _ in enumerate(skip_first_batches(other, 2)):
        if number == 1:
            third.load_state_dict(other.state_dict())
            break
    assert list(third) == expected[4:]


@pytest.mark.parametrize("whole_batches", [False, True], ids=["sampler", "batch sampler"])
@pytest.mark.parametrize("chosen", ["loader before", "loader", "skipped", "sampler before", "sampler"])
def test_batches_are_skipped_in_the_epoch_that_is_chosen(whole_batches, chosen):
    def make():
        sampler = DistributedSampler(range(24), 1, 0, seed=3)
        return loader_of(
            **{"batch_size": 1, "batch_sampler": InBatches(sampler)} if whole_batches else {"sampler": sampler}
        )

    loader, whole = make(), make()
    whole.set_epoch(3)
    expected, following = list(whole), list(whole)
    if chosen == "loader before":
        loader.set_epoch(3)
    if chosen == "sampler before":
        loader.batch_sampler.sampler.set_epoch(3)
    skipped = skip_first_batches(loader, 2)
    if chosen in ("loader", "skipped"):
        {"loader": loader, "skipped": skipped}[chosen].set_epoch(3)
    if chosen == "sampler":
        loader.batch_sampler.sampler.set_epoch(3)
    assert len(skipped) == len(expected) - 2
    assert list(skipped) == expected[2:]
    assert list(skipped) == following


def test_skipping_needs_no_data():
    class Untouchable(Dataset):
        def __len__(self):
            return 10**9

        def __getitem__(self, index):
            assert index >= 4 * 10**8
            return index

    loader = prepare_loader(DataLoader(Untouchable(), batch_size=4), DataShard(0, 1))
    assert next(iter(skip_first_batches(loader, 10**8))).tolist() == [400000000 + i for i in range(4)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 99}, "version 99"),
        ({"version": None}, "version None"),
        ({"samples": -1}, "samples is -1"),
        ({"samples": 25}, "sample 25"),
        ({"epoch": "one"}, "epoch is 'one'"),
    ],
)
def test_a_malformed_state_is_refused_and_changes_nothing(change, message):
    loader = loader_of()
    with pytest.raises(DataStateError, match=message):
        loader.load_state_dict({**loader.state_dict(), **change})
    assert loader.position == Cursor()


def test_a_state_without_a_position_says_what_it_holds():
    with pytest.raises(DataStateError, match="no epoch and no samples; it holds version"):
        loader_of().load_state_dict({"version": 1})


def in_the_middle(loader):
    next(iter(loader))
    return loader.state_dict()


@pytest.mark.parametrize("size", [20, 28])
def test_a_dataset_of_another_length_is_refused_inside_an_epoch_and_named_at_its_start(size):
    with pytest.raises(DataStateError, match=f"dataset of 24 samples, this one has {size}.* set_epoch"):
        loader_of(size).load_state_dict(in_the_middle(loader_of(24)))
    other = loader_of(size)
    with pytest.warns(RuntimeWarning, match=f"24 samples, this one has {size}; epoch 3 begins with this one"):
        other.load_state_dict({**loader_of(24).state_dict(), "epoch": 3})
    assert other.epoch == 3
    assert sorted(chain.from_iterable(other)) == list(range(size))


class Named(Dataset):
    def __init__(self, fingerprint):
        self.fingerprint = fingerprint

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return index


@pytest.mark.parametrize("swaps", [False, True])
def test_a_position_in_data_of_another_kind_is_refused_inside_an_epoch_only(swaps):
    def streamed():
        return prepare_loader(DataLoader(AugmentedStream(), 4, collate_fn=list), DataShard())

    first, second = (loader_of(), streamed()) if swaps else (streamed(), loader_of())
    state = in_the_middle(first)
    with pytest.raises(DataStateError, match="Give each loader its own state"):
        second.load_state_dict(state)
    list(first)
    second.load_state_dict(first.state_dict())
    assert second.position == first.position == Cursor(2)


def test_another_dataset_of_the_same_length_is_refused_by_its_fingerprint():
    first, second = (prepare_loader(DataLoader(Named(name)), DataShard(0, 1)) for name in ("a", "b"))
    with pytest.raises(DataStateError, match="fingerprint 'a', this one has 'b'"):
        second.load_state_dict(in_the_middle(first))


@pytest.mark.parametrize("in_place", [False, True])
def test_weights_given_to_a_sampler_between_epochs_are_followed(in_place):
    def weighted(chosen):
        weights = torch.zeros(24, dtype=torch.float64)
        weights[chosen] = 1
        return weights

    sampler = WeightedRandomSampler(weighted([1, 2, 3]), 24)
    loader = loader_of(sampler=sampler)
    assert set(chain.from_iterable(loader)) == {1, 2, 3}
    before = loader.state_dict()["source"]["order"]
    if in_place:
        sampler.weights.copy_(weighted([20]))
    else:
        sampler.weights = weighted([20])
    passing = iter(loader)
    assert set(next(passing)) == {20}
    state = loader.state_dict()
    assert state["source"]["order"] != before
    sampler.weights = weighted([5])
    assert set(chain.from_iterable(passing)) == {20}
    assert set(chain.from_iterable(loader)) == {5}
    resumed = loader_of(sampler=WeightedRandomSampler(weighted([7]), 24))
    with pytest.raises(DataStateError, match="weights was"):
        resumed.load_state_dict(state)


def test_indices_given_to_a_sampler_between_epochs_are_followed():
    sampler = SubsetRandomSampler([0, 1, 2, 3])
    loader = loader_of(sampler=sampler)
    assert set(chain.from_iterable(loader)) == {0, 1, 2, 3}
    for chosen in ([8, 9, 10], np.array([3, 4, 5]), np.array([5, 6, 7])):
        sampler.indices = chosen
        assert set(chain.from_iterable(loader)) == set(chosen)
    assert len(loader) == 1


@pytest.mark.parametrize(
    ("sampler", "values"),
    [
        (lambda indices: SubsetRandomSampler(indices), torch.arange(12)),
        (lambda indices: SubsetRandomSampler(indices), np.arange(12)),
        (lambda indices: SubsetRandomSampler(indices), list(range(12))),
        (lambda weights: WeightedRandomSampler(weights, 12), torch.ones(24, dtype=torch.float64)),
        (lambda weights: WeightedRandomSampler(weights, 12), np.ones(24)),
    ],
    ids=["tensor", "array", "list", "weights", "array of weights"],
)
@pytest.mark.parametrize("nests", [False, True])
def test_what_a_sampler_is_made_of_is_changed_in_place_for_the_next_epoch_only(sampler, values, nests):
    values, changed = copy.deepcopy(values), [12, *range(1, 12)] if len(values) == 12 else [0.0] * 23 + [1.0]
    expected, loader = list(loader_of(sampler=sampler(copy.deepcopy(values)))), loader_of(sampler=sampler(values))
    passing = iter(loader)
    read = [next(passing)]
    for number, value in enumerate(changed):
        values[number] = value
    if nests:
        assert list(loader) == expected
    read.append(next(passing))
    state = loader.state_dict()
    assert read + list(passing) == expected
    with pytest.raises(DataStateError, match="of another order"):
        loader_of(sampler=sampler(values)).load_state_dict(state)
    following, later = loader_of(sampler=sampler(values)), list(loader)
    following.set_epoch(1)
    assert later == list(following)
    assert len(values) == 24 or 12 in chain.from_iterable(later)


@pytest.mark.parametrize(
    "indices", [["a", "b"], [(1, 2), (3,)], [torch.ones(2), torch.ones(3)], [None], np.array(["a"])]
)
def test_a_sampler_of_ones_own_may_have_other_indices_than_numbers(indices):
    sampler = Walked(24)
    sampler.indices = indices
    loader = loader_of(sampler=sampler)
    for _ in range(2):
        assert sorted(chain.from_iterable(loader)) == list(range(24))


def test_another_order_is_refused_inside_an_epoch_only():
    shuffled, plain = loader_of(shuffle=True), loader_of()
    plain.load_state_dict(shuffled.state_dict())
    next(iter(shuffled))
    with pytest.raises(DataStateError, match="kind was 'shuffled' and is 'sequential'"):
        plain.load_state_dict(shuffled.state_dict())


def test_a_sampler_that_became_shorter_is_refused_when_it_is_walked():
    loader, other = (
        prepare_loader(DataLoader(range(24), sampler=Walked(size), batch_size=4), DataShard(0, 1)) for size in (24, 8)
    )
    passing = iter(loader)
    for _ in range(4):
        next(passing)
    other.load_state_dict(loader.state_dict())
    with pytest.raises(DataStateError, match="gives only 8 indices"):
        list(other)


@pytest.mark.parametrize("rank", range(2))
@pytest.mark.parametrize("index", [24, -25])
def test_an_index_outside_of_the_dataset_is_named_on_every_rank(rank, index):
    loader = loader_of(24, rank, 2, sampler=[0, 1, 2, index])
    with pytest.raises(DataError, match=rf"index {index}, but the dataset has 24 samples"):
        list(loader)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(2, 60),
    st.lists(st.tuples(st.sampled_from([2, 4, 6]), st.integers(1, 5), st.integers(0, 6)), min_size=1, max_size=3),
    st.booleans(),
    st.booleans(),
)
def test_node_sharding_resumes_with_other_numbers_of_ranks_on_each_node(size, segments, shuffle, even):
    def loaders(ranks, batch_size):
        options = LoaderOptions(sharding="node", num_nodes=2, data_seed=5, even_batches=even)
        return [
            loader_of(size, rank, ranks, batch_size=batch_size, shuffle=shuffle, options=options)
            for rank in range(ranks)
        ]

    state, delivered = None, []
    for ranks, batch_size, stop in [*segments, (2, 3, None)]:
        group = loaders(ranks, batch_size)
        if state is not None:
            for loader in group:
                loader.load_state_dict(state)
        if over(group, 0):
            break
        part, state = run(group, stop)
        delivered += part
        if state["epoch"]:
            break
    assert sorted(delivered) == list(range(size))


def test_node_sharding_refuses_another_number_of_nodes_inside_an_epoch():
    two, three = (
        loader_of(24, 0, 6, options=LoaderOptions(sharding="node", num_nodes=nodes, data_seed=1)) for nodes in (2, 3)
    )
    three.load_state_dict(two.state_dict())
    next(iter(two))
    with pytest.raises(DataStateError, match="num_nodes was 2 and is 3"):
        three.load_state_dict(two.state_dict())


def test_persistent_workers_survive_a_break_and_start_over():
    loader = loader_of(40, shuffle=True, num_workers=1, persistent_workers=True)
    for _ in loader:
        break
    other = loader_of(40, shuffle=True)
    other.set_epoch(1)
    assert list(loader) == list(other)

"""One rank reads for all, with real ranks: what arrives, in which order, and that nobody waits for one who left."""

import threading
import time

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, IterableDataset

from accel_data.dispatch.pipeline import _GOODBYE, DispatchThread, _bytes_of
from accel_data.dispatch.source import DispatchSource
from accel_data.loader import PreparedLoader
from accel_data.loader_spec import LoaderSpec, open_source
from accel_data.options import LoaderOptions
from accel_data.prepare import prepare_loader
from accel_state.errors import ConfigError, DataError, DataStateError
from accel_state.parallelism.config import DataShard

pytestmark = pytest.mark.filterwarnings("ignore:every reader of")


class Numbers(IterableDataset):
    """Fails where it is read by another rank than the first: that is what dispatching is for."""

    def __init__(self, n, fail_at=None, delay=0.0):
        self.n, self.fail_at, self.delay = n, fail_at, delay

    def __iter__(self):
        assert not dist.is_initialized() or dist.get_rank() == 0
        for i in range(self.n):
            if i == self.fail_at:
                raise KeyError(f"sample {i} is broken")
            time.sleep(self.delay)
            yield i


def prepared(dataset, rank=0, ranks=1, *, slice_fn=None, options=None, shard=None, **kwargs):
    loader = DataLoader(dataset, **({"batch_size": 2} | kwargs))
    options = options or LoaderOptions(dispatch_batches=True)
    spec = LoaderSpec.of(loader, shard or DataShard(rank, ranks), options, slice_fn=slice_fn)
    source = DispatchSource(open_source(spec.of_reader()), spec)
    return PreparedLoader(source, options=options)


def listed(loader):
    return [batch.tolist() for batch in loader]


def threads():
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("accel-dispatch")]


def test_one_process_needs_no_group():
    assert listed(prepared(Numbers(5))) == [[0, 1], [2, 3], [4]]
    assert not threads()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("workers", [0, 1, 2])
def test_each_rank_receives_its_batches_in_order(rank, workers):
    loader = prepared(Numbers(20), rank, 2, num_workers=workers)
    batches = listed(loader)
    assert batches == [[4 * i + 2 * rank, 4 * i + 2 * rank + 1] for i in range(5)]
    assert listed(loader) == batches
    assert loader.epoch == 2
    assert not threads()


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("n", "options", "expected", "counts"),
    [
        (7, {}, [[[0, 1], [4, 5]], [[2, 3], [6, 4]]], (2, 1)),
        (5, {}, [[[0, 1], [4]], [[2, 3], [4]]], (1, 0)),
        (7, {"even_batches": False}, [[[0, 1], [4, 5]], [[2, 3], [6]]], (2, 1)),
        (5, {"even_batches": False}, [[[0, 1], [4]], [[2, 3]]], (1, -1)),
        (7, {"split_batches": True}, [[[0], [2], [4], [6]], [[1], [3], [5], [6]]], (1, 0)),
        (8, {}, [[[0, 1], [4, 5]], [[2, 3], [6, 7]]], None),
    ],
)
def test_the_last_step_is_divided_and_says_what_is_real(rank, n, options, expected, counts):
    loader = prepared(Numbers(n), rank, 2, options=LoaderOptions(dispatch_batches=True, **options))
    got, seen = [], []
    for batch in loader:
        got.append(batch.tolist())
        seen.append((loader.end_of_dataloader, loader.real_counts))
    assert got == expected[rank]
    assert [end for end, _ in seen] == [False] * (len(got) - 1) + [True]
    if len(got) == len(expected[0]):
        assert seen[-1][1] == counts
        assert loader.remainder == n % loader.total_batch_size


@pytest.mark.ranks(2)
def test_any_content_travels(rank):
    def collate(ids):
        return {
            "text": [f"sample {i}" for i in ids],
            "ragged": [torch.full((i + 1,), i) for i in ids],
            "nested": (torch.tensor(ids), {"empty": torch.zeros(0)}),
            "none": None,
        }

    batches = list(prepared(Numbers(7), rank, 2, collate_fn=collate))
    assert len(batches) == 2
    for batch, ids in zip(batches, [[0, 1], [4, 5]] if rank == 0 else [[2, 3], [6, 4]], strict=True):
        assert batch["text"] == [f"sample {i}" for i in ids]
        assert [tensor.tolist() for tensor in batch["ragged"]] == [[i] * (i + 1) for i in ids]
        assert batch["nested"][0].tolist() == ids
        assert batch["none"] is None


@pytest.mark.ranks(2)
def test_batches_of_different_width_travel(rank):
    def collate(ids):
        return torch.zeros(len(ids), max(ids) + 1)

    shapes = [tuple(batch.shape) for batch in prepared(Numbers(7), rank, 2, collate_fn=collate)]
    assert shapes == ([(2, 2), (2, 6)] if rank == 0 else [(2, 4), (1, 7)])


@pytest.mark.ranks(2)
def test_a_slice_function_cuts(rank):
    def slice_fn(batch, wanted, process_index, num_processes):
        return batch[wanted] * 10 + process_index

    assert listed(prepared(Numbers(4), rank, 2, slice_fn=slice_fn)) == [[[0, 10], [21, 31]][rank]]


@pytest.mark.ranks(2)
def test_ranks_that_share_data_receive_the_same(rank):
    assert listed(prepared(Numbers(4), shard=DataShard(0, 1))) == [[0, 1], [2, 3]]


@pytest.mark.ranks(2)
def test_an_error_of_the_reader_is_raised_everywhere_in_its_place(rank):
    loader = prepared(Numbers(20, fail_at=9), rank, 2)
    with pytest.raises(KeyError if rank == 0 else DataError, match="sample 9 is broken") as caught:
        listed(loader)
    if rank == 1:
        assert "KeyError" in str(caught.value)
        assert "batch 3" in str(caught.value)
    dist.barrier()
    assert not threads()


@pytest.mark.ranks(2)
def test_an_error_before_the_first_batch_is_raised_everywhere(rank):
    with pytest.raises(KeyError if rank == 0 else DataError, match="sample 0 is broken"):
        next(iter(prepared(Numbers(20, fail_at=0), rank, 2)))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stop", [1, 3])
def test_leaving_the_loop_leaves_nothing_behind(rank, stop):
    loader = prepared(Numbers(400), rank, 2)
    for number, _ in enumerate(loader, 1):
        if number == stop:
            break
    dist.barrier()
    deadline = time.monotonic() + 60
    while threads() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not threads()
    assert listed(loader)[0] == [2 * rank, 2 * rank + 1]


@pytest.mark.ranks(2)
def test_the_reader_does_not_wait_for_a_rank_that_left_alone(rank):
    loader = prepared(Numbers(200), rank, 2)
    seen = 0
    for _ in loader:
        seen += 1
        if rank == 1 and seen == 2:
            break
    assert seen == (50 if rank == 0 else 2)
    loader.set_epoch(5)
    assert len(listed(loader)) == 50


@pytest.mark.ranks(2)
def test_a_rank_left_alone_by_the_reader_is_told(rank):
    loader = prepared(Numbers(4000, delay=0.001), rank, 2)
    if rank == 0:
        next(iter(loader))
    else:
        with pytest.raises(DataError, match="rank 0 left the loop"):
            listed(loader)


@pytest.mark.ranks(2)
def test_collectives_of_the_step_do_not_meet_those_of_the_reader(rank):
    total = torch.zeros(())
    for batch in prepared(Numbers(400), rank, 2):
        value = batch.sum().float()
        dist.all_reduce(value)
        total += value
    assert total.item() == sum(range(400))


@pytest.mark.ranks(2)
def test_two_loaders_in_one_another_keep_apart(rank):
    outer, inner = prepared(Numbers(12), rank, 2), prepared(Numbers(8), rank, 2)
    got = [(batch.tolist()[0], [other[0] for other in listed(inner)]) for batch in outer]
    assert got == [(4 * i + 2 * rank, [2 * rank, 4 + 2 * rank]) for i in range(3)]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("split", [False, True])
def test_a_resumed_loader_goes_on_behind_what_was_delivered(rank, split):
    options = LoaderOptions(dispatch_batches=True, split_batches=split)
    whole = listed(prepared(Numbers(20), rank, 2, options=options))
    loader = prepared(Numbers(20), rank, 2, options=options)
    iterator = iter(loader)
    got = [next(iterator).tolist() for _ in range(2)]
    state = loader.state_dict()
    del iterator
    states = [None, None]
    dist.all_gather_object(states, state)
    assert states[0] == states[1]
    other = prepared(Numbers(20), rank, 2, options=options)
    other.load_state_dict(state)
    assert got + listed(other) == whole


@pytest.mark.ranks(2)
def test_ranks_at_different_positions_are_told(rank):
    loader = prepared(Numbers(20), rank, 2)
    loader.set_epoch(rank)
    if rank == 0:
        next(iter(loader))
    else:
        with pytest.raises(DataStateError, match="load the same state"):
            next(iter(loader))


@pytest.mark.ranks(2)
def test_shards_that_do_not_make_up_all_are_refused_everywhere(rank):
    with pytest.raises(DataError, match="together they must be 0 to 1 of 2"):
        next(iter(prepared(Numbers(4), shard=DataShard(0, 2))))


class Squares(Dataset):
    """Map-style, and read by the first rank only."""

    def __len__(self):
        return 22

    def __getitem__(self, index):
        assert dist.get_rank() == 0
        return index * index


@pytest.mark.ranks(2)
@pytest.mark.parametrize("workers", [0, 1])
def test_map_style_data_is_dispatched_in_the_order_of_one_process(rank, workers):
    options = LoaderOptions(dispatch_batches=True, data_seed=3)

    def make(shard, dataset, dispatch):
        loader = DataLoader(dataset, batch_size=2, shuffle=True, num_workers=workers)
        return prepare_loader(loader, shard, options=options if dispatch else LoaderOptions(data_seed=3))

    one = listed(make(DataShard(0, 1), [i * i for i in range(22)], False))
    loader = make(DataShard(rank, 2), Squares(), True)
    assert len(loader) == 6
    got = []
    for batch in loader:
        got.append(batch.tolist())
        if len(got) == 2:
            state = loader.state_dict()
    assert got[:5] == one[rank:10:2]
    assert got[5] == [one[10][rank]]
    assert (loader.remainder, loader.real_counts) == (2, (1, 1))
    other = make(DataShard(rank, 2), Squares(), True)
    other.load_state_dict(state)
    assert listed(other) == got[2:]


class Rotating:
    """A sampler whose state decides the order: each pass begins one index later."""

    passes = 0

    def __iter__(self):
        self.passes += 1
        return iter([(index + self.passes) % 8 for index in range(8)])

    def __len__(self):
        return 8

    def state_dict(self):
        return {"passes": self.passes}

    def load_state_dict(self, state):
        self.passes = state["passes"]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("leaves", [False, True])
def test_the_state_of_a_sampler_behind_a_pass_is_saved_on_every_rank(rank, leaves):
    def make():
        loader = DataLoader([*range(8)], batch_size=2, sampler=Rotating())
        return prepare_loader(loader, DataShard(rank, 2), options=LoaderOptions(dispatch_batches=True))

    loader, resumed = make(), make()
    for _ in loader:
        if leaves:
            loader.disclaim()  # nothing continues after it
            break
    state = loader.state_dict()
    states = [None, None]
    dist.all_gather_object(states, state)
    assert states[0] == states[1]
    following = listed(loader)
    assert following[0] == [2 + 2 * rank, 3 + 2 * rank]
    resumed.load_state_dict(state)
    assert listed(resumed) == following
    assert listed(resumed) == listed(loader)


@pytest.mark.ranks(2)
def test_a_custom_batch_sampler_is_dispatched_whole(rank):
    batches = [[0, 1, 2], [3], [4, 5]]
    loader = DataLoader(Squares(), batch_sampler=batches)
    options = LoaderOptions(dispatch_batches=True, data_seed=0)
    ours = prepare_loader(loader, DataShard(rank, 2), options=options)
    assert listed(ours) == [[[0, 1, 4], [16, 25]], [[9], [16, 25]]][rank]
    assert ours.real_counts == (2, 0)


class Part(Numbers):
    already_sharded = True


def test_data_that_is_already_shared_out_is_not_dispatched():
    device = torch.device("cpu")
    with pytest.raises(ConfigError, match="already_sharded = True"):
        prepare_loader(
            DataLoader(Part(4)), DataShard(0, 2), device=device, options=LoaderOptions(dispatch_batches=True)
        )
    loader = prepare_loader(DataLoader(Part(4), batch_size=2), DataShard(0, 2), device=device)
    assert listed(loader) == [[0, 1], [2, 3]]


class OnDemand(Dataset):
    """Numbers of which each pair waits until the second rank is done with the last but one; loaders look one ahead."""

    def __init__(self, folder):
        self.folder = folder

    def __len__(self):
        return 12

    def __getitem__(self, index):
        step = index // 2
        deadline = time.monotonic() + 60
        while step > 1 and not (self.folder / f"{step - 2}").exists():
            if time.monotonic() > deadline:
                raise TimeoutError(f"nobody was given step {step - 2}, which was read long ago")
            time.sleep(0.001)
        return torch.tensor(index)


@pytest.mark.ranks(2)
def test_no_step_that_is_waited_for_is_kept_back_for_others_to_join_it(rank, world_size, tmp_path):
    loader = DataLoader(OnDemand(tmp_path), batch_size=1)
    loader = prepare_loader(loader, DataShard(rank, world_size), options=LoaderOptions(dispatch_batches=True))
    for step, batch in enumerate(loader):
        assert batch.item() == 2 * step + rank
        if rank == 1:
            (tmp_path / f"{step}").touch()


def test_the_size_of_a_step_is_that_of_all_its_tensors():
    """It bounds what is read ahead: labels that stand first would make it look like nothing."""
    part = {"label": torch.zeros(2, dtype=torch.int64), "image": torch.zeros(2, 3, 4), "name": ["a", "b"]}
    assert _bytes_of((part,)) == 16 + 96


def test_a_rank_waits_longer_for_its_thread_than_torch_takes_to_notice_a_dead_worker():
    from torch.utils.data._utils import MP_STATUS_CHECK_INTERVAL

    assert _GOODBYE > MP_STATUS_CHECK_INTERVAL


class Drawing:
    """A sampler whose state is a tensor: each pass shuffles on from where the one before ended."""

    def __init__(self):
        self.state = torch.Generator().manual_seed(5)

    def __iter__(self):
        return iter(torch.randperm(8, generator=self.state).tolist())

    def __len__(self):
        return 8

    def state_dict(self):
        return {"generator": self.state.get_state()}

    def load_state_dict(self, state):
        self.state.set_state(state["generator"])


def test_the_state_of_a_sampler_may_have_tensors():
    loader = prepared([*range(8)], sampler=Drawing())
    for _ in range(2):
        assert sorted(number for batch in listed(loader) for number in batch) == [*range(8)]


class GoesOn(IterableDataset):
    """Begins where it stands, and reads slowly."""

    def __init__(self):
        self.at = 0

    def __iter__(self):
        while self.at < 40:
            self.at += 1
            time.sleep(0.02)
            yield self.at - 1

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


@pytest.mark.ranks(2)
def test_a_pass_whose_thread_outlives_it_ends_before_the_next(rank, monkeypatch):
    """Without it, the next pass would lack what the thread has read ahead."""
    monkeypatch.setattr(DispatchThread.close, "__defaults__", (0.0,))
    loader = prepared(GoesOn(), rank, 2)
    for first in (0, 4, 8):
        assert next(iter(loader)).tolist() == [first + 2 * rank, first + 2 * rank + 1]

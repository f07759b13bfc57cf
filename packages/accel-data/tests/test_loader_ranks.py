"""Real ranks: they agree on the order, deliver every sample once, and go on with other numbers of ranks."""

import gc
import json
import os
import signal
import subprocess
import sys
import time
from collections import deque

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from accel_data import LoaderOptions, prepare_loader
from accel_data.loader_group import connect
from accel_state.collectives.objects import all_gather_object
from accel_state.errors import ConfigError, DataError, DataStateError
from accel_state.parallelism.config import DataShard, ParallelismConfig
from accel_state.process_group.fake_group import open_fake_group
from accel_state.topology import Topology

SIZE = 53


class Numbers(Dataset):
    def __init__(self, size=SIZE):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return torch.tensor(index)


class Walked:
    """A custom sampler that shuffles with torch's global generator."""

    def __iter__(self):
        return iter(torch.randperm(SIZE).tolist())

    def __len__(self):
        return SIZE


def make(rank, ranks, *, num_workers=0, batch_size=3, options=None, **kwargs):
    kwargs = kwargs or {"shuffle": True}
    dataset = DataLoader(Numbers(), batch_size=batch_size, num_workers=num_workers, **kwargs)
    return prepare_loader(dataset, DataShard(rank, ranks), options=options)


def real(loader, batch, rank):
    return batch[: max(loader.real_counts[rank], 0)].tolist()


def together(mine):
    """The steps of all ranks, rank after rank within a step."""
    steps = zip(*all_gather_object(mine), strict=True)
    return [index for step in steps for part in step for index in part]


@pytest.mark.ranks(4)
@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("sampler", [None, "walked"])
@pytest.mark.sampled(1)
def test_differently_seeded_ranks_share_one_order(rank, world_size, num_workers, sampler):
    torch.manual_seed(rank)
    kwargs = {"sampler": Walked()} if sampler else {}
    loader = make(rank, world_size, num_workers=num_workers, **kwargs)
    for _ in range(2):
        everything = together([real(loader, batch, rank) for batch in loader])
        assert sorted(everything) == list(range(SIZE))
        assert everything != list(range(SIZE))


@pytest.mark.ranks(4)
@pytest.mark.parametrize("num_workers", [1, 2])
@pytest.mark.parametrize(("batch_size", "fewer"), [(2, 2), (5, 3)])
@pytest.mark.sampled(1)
def test_fewer_ranks_go_on_where_more_have_stopped(rank, world_size, num_workers, batch_size, fewer):
    loader = make(rank, world_size, num_workers=num_workers)
    iterator = iter(loader)
    first = together([real(loader, next(iterator), rank) for _ in range(2)])
    state = loader.state_dict()
    assert all(other == state for other in all_gather_object(state))
    del iterator

    # All take part in agreeing on a seed; the state's replaces it.
    resumed = make(min(rank, fewer - 1), fewer, num_workers=num_workers, batch_size=batch_size)
    resumed.load_state_dict(json.loads(json.dumps(state)))
    mine = [real(resumed, batch, min(rank, fewer - 1)) for batch in resumed]
    parts = all_gather_object(mine)[:fewer]
    rest = [index for step in zip(*parts, strict=True) for part in step for index in part]
    assert sorted(first + rest) == list(range(SIZE))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("num_workers", [0, 2])
def test_more_ranks_read_the_same_global_batches(rank, world_size, num_workers):
    options = LoaderOptions(global_batch_size=7, data_seed=4)
    loader = make(rank, world_size, num_workers=num_workers, batch_size=2, options=options)
    alone = make(0, 1, batch_size=2, options=options)
    sharded = together([real(loader, batch, rank) for batch in loader])
    assert sharded == [index for batch in alone for index in batch.tolist()]


@pytest.mark.ranks(2)
def test_uneven_ends_are_known_on_every_rank(rank, world_size):
    options = LoaderOptions(even_batches=False, data_seed=4)
    loader = make(rank, world_size, batch_size=26, options=options)
    batches = list(loader)
    assert [len(batch) for batch in batches] == ([26, 1] if rank == 0 else [26])
    assert loader.end_of_dataloader
    assert loader.epoch == 1
    assert loader.real_counts == ((1, -1) if rank == 0 else (26, 26))


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    ("axis", "peers"), [("tp", [0, 0, 1, 1]), ("cp", [0, 0, 1, 1]), ("sp", [0, 0, 1, 1]), ("pp", [0, 1, 0, 1])]
)
@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.sampled(2)
def test_peers_that_split_the_model_read_the_same(rank, world_size, axis, peers, num_workers):
    torch.manual_seed(rank)
    config = ParallelismConfig(dp_shard_size=2, **{f"{axis}_size": 2})
    shard = config.data_shard(Topology.on_one_node(rank, world_size))
    loader = make(shard.index, shard.count, num_workers=num_workers)
    orders = all_gather_object([real(loader, batch, shard.index) for batch in loader])
    for one, peer in enumerate(peers):
        assert orders[one] == orders[peers.index(peer)]
    different = [orders[peers.index(peer)] for peer in range(2)]
    assert sorted(index for order in different for batch in order for index in batch) == list(range(SIZE))


@pytest.mark.ranks(3)
@pytest.mark.parametrize(
    ("shuffle", "options"),
    [
        (True, LoaderOptions()),
        (True, LoaderOptions(data_seed=4)),
        (False, LoaderOptions()),
        (True, LoaderOptions(use_seedable_sampler=True, data_seed=4)),
        (True, LoaderOptions(global_batch_size=7, data_seed=4)),
    ],
    ids=["drawn", "given", "in order", "seedable", "elastic"],
)
def test_datasets_of_different_lengths_are_refused_on_every_rank(rank, world_size, shuffle, options):
    dataset = DataLoader(Numbers(SIZE - rank % 2), batch_size=3, shuffle=shuffle)
    message = "different lengths: rank 0 has 53 samples, rank 1 has 52 samples, rank 2 has 53 samples"
    with pytest.raises(DataError, match=message):
        prepare_loader(dataset, DataShard(rank, world_size), options=options)


@pytest.mark.ranks(2)
def test_lengths_are_compared_once_and_not_with_every_batch(rank, world_size, monkeypatch):
    loader = make(rank, world_size, options=LoaderOptions(data_seed=4))
    monkeypatch.setattr(dist, "all_gather_object", None)
    assert len(list(loader)) == len(loader)


@pytest.mark.ranks(2)
def test_ranks_given_different_seeds_share_the_first_ones_order(rank, world_size):
    loader = make(rank, world_size, options=LoaderOptions(data_seed=4 + rank))
    assert sorted(together([real(loader, batch, rank) for batch in loader])) == list(range(SIZE))


SCRIPT = """
import json, os, sys
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader
from accel_data import LoaderOptions, prepare_loader
from accel_state.collectives.objects import all_gather_object
from accel_state.parallelism.config import DataShard

rank, ranks, workers, batch_size = map(int, sys.argv[1:5])
store, log = sys.argv[5:7]
dist.init_process_group("gloo", init_method="file://" + store, rank=rank, world_size=ranks)
torch.manual_seed(os.getpid())
loader = prepare_loader(
    DataLoader(range(600), batch_size=batch_size, shuffle=True, num_workers=workers), DataShard(rank, ranks)
)
lines = [line for line in open(log).read().splitlines(True) if line.endswith(chr(10))] if os.path.exists(log) else []
dist.barrier()
if lines:
    loader.load_state_dict(json.loads(lines[-1])["state"])
for batch in loader:
    mine = batch[: max(loader.real_counts[rank], 0)].tolist()
    indices = [index for part in all_gather_object(mine) for index in part]
    if rank == 0:
        with open(log, "a") as file:
            file.write(json.dumps({"indices": indices, "state": loader.state_dict()}) + chr(10))
dist.barrier()
dist.destroy_process_group()
"""


def start(folder, run, ranks, workers, batch_size):
    arguments = [str(workers), str(batch_size), str(folder / f"store{run}"), str(folder / "log")]
    return [
        subprocess.Popen([sys.executable, "-c", SCRIPT, str(rank), str(ranks), *arguments], start_new_session=True)
        for rank in range(ranks)
    ]


RUNS = [
    [(2, 1, 3), (3, 0, 2), (1, 2, 7)],
    [(4, 0, 2), (2, 2, 5)],
    [(2, 2, 4), (4, 1, 3)],
    [(4, 2, 1), (4, 1, 6)],
    [(4, 1, 2), (2, 0, 3), (4, 2, 2)],
    [(2, 0, 3), (2, 1, 8)],
    [(1, 2, 3), (4, 1, 2)],
    [(2, 2, 2), (2, 2, 9)],
    [(4, 1, 3), (3, 1, 3)],
    [(3, 2, 2), (2, 1, 6), (4, 0, 1)],
    [(4, 2, 2), (1, 0, 11)],
    [(2, 1, 4), (4, 2, 1), (2, 2, 3)],
]
"""A dozen stories of (ranks, workers, batch size): all runs but the last are killed."""


@pytest.mark.slow
@pytest.mark.fault
@pytest.mark.timeout(600)
@pytest.mark.parametrize("runs", RUNS, ids=lambda runs: "-".join(f"{r}x{w}x{b}" for r, w, b in runs))
def test_killed_ranks_are_resumed_by_others_without_loss(tmp_path, runs):
    check_killed(tmp_path, runs)


@pytest.mark.slow
@pytest.mark.fault
def test_two_killed_ranks_are_resumed_by_one(tmp_path):
    check_killed(tmp_path, [(2, 1, 3), (1, 1, 20)])


def check_killed(tmp_path, runs):
    log = tmp_path / "log"
    for number, (ranks, workers, batch_size) in enumerate(runs):
        before = len(log.read_text().splitlines()) if log.exists() else 0
        processes = start(tmp_path, number, ranks, workers, batch_size)
        try:
            if number == len(runs) - 1:
                assert [process.wait(120) for process in processes] == [0] * ranks
                break
            deadline = time.monotonic() + 120
            while not log.exists() or len(log.read_text().splitlines()) < before + 8:
                assert time.monotonic() < deadline
                time.sleep(0.01)
        finally:
            for process in processes:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        # What a kill leaves of a line that was being written is no checkpoint.
        log.write_text("".join(line for line in log.read_text().splitlines(keepends=True) if line.endswith("\n")))
    indices = [index for line in log.read_text().splitlines() for index in json.loads(line)["indices"]]
    assert sorted(indices) == list(range(600))


def wait_for(file, seconds=120):
    """Waits until another process has made the file."""
    deadline = time.monotonic() + seconds
    while not file.exists():
        assert time.monotonic() < deadline, f"nobody made {file}"
        time.sleep(0.01)


class Deadly(Numbers):
    """Kills the worker that reads sample ``at`` on rank ``rank``, or fails there."""

    def __init__(self, rank, *, kills):
        super().__init__()
        self.rank, self.kills = rank, kills

    def __getitem__(self, index):
        if self.rank == 0 and index == 12:
            if self.kills:
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("sample 12 is broken")
        return super().__getitem__(index)


class DeadlyStream(Deadly, IterableDataset):
    def __iter__(self):
        return map(self.__getitem__, range(SIZE))


@pytest.mark.fault
@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("dataset", "kills"), [pytest.param(Deadly, True, marks=pytest.mark.slow), (DeadlyStream, True), (Deadly, False)]
)
@pytest.mark.filterwarnings("ignore:every reader of")
def test_what_one_rank_cannot_read_is_an_error_on_every_rank(rank, world_size, dataset, kills, tmp_path):
    options = LoaderOptions(dispatch_batches=False)
    loader = DataLoader(dataset(rank, kills=kills), batch_size=3, num_workers=1)
    loader = prepare_loader(loader, DataShard(rank, world_size), options=options)
    expected = DataError if kills or rank else ValueError
    message = "workers died" if kills else "sample 12 is broken"
    over = tmp_path / "over"
    # Rank 0 has no step: torch tells of a dead worker wherever the program is, and so it is in the loader.
    steps = loader if rank == 0 else (wait_for(over) for _ in loader)
    with pytest.raises(expected, match=message) as caught:
        deque(steps, maxlen=0)
    over.touch()
    assert ("another cannot go on: rank 0" in str(caught.value)) == (rank == 1)


class DeadlyInside(Deadly):
    """Dies once the rank is inside of its step."""

    def __init__(self, rank, folder):
        super().__init__(rank, kills=True)
        self.inside = folder / "inside"

    def __getitem__(self, index):
        if self.rank == 0 and index == 12:
            wait_for(self.inside)
        return super().__getitem__(index)


@pytest.mark.fault
@pytest.mark.ranks(2)
def test_a_worker_that_dies_during_the_step_is_told_to_the_other_ranks(rank, world_size, tmp_path):
    loader = DataLoader(DeadlyInside(rank, tmp_path), batch_size=3, num_workers=1, prefetch_factor=8)
    loader = prepare_loader(loader, DataShard(rank, world_size))
    reading, over = tmp_path / "reading", tmp_path / "over"

    def step():
        wait_for(reading)
        (tmp_path / "inside").touch()
        wait_for(tmp_path / "never")

    if rank == 0:
        with pytest.raises(RuntimeError, match="killed by signal"):
            deque((step() for _ in loader), maxlen=0)
        over.touch()
    else:
        batches = iter(loader)
        next(batches)
        reading.touch()
        wait_for(over)
        with pytest.raises(DataError, match=r"rank 0 could not read its next batch: DataError: 1 of .* workers died"):
            list(batches)


class UnequalParts(IterableDataset):
    """The second worker has nothing to read, and the first fails late."""

    def __iter__(self):
        if get_worker_info().id == 0:
            yield from range(12)
            raise RuntimeError("sample 12 is broken")


def test_a_worker_that_has_read_all_is_not_taken_for_dead():
    loader = prepare_loader(DataLoader(UnequalParts(), batch_size=3, num_workers=2), DataShard(0, 1))
    with pytest.raises(RuntimeError, match="sample 12 is broken"):
        list(loader)


WAITING = """
import os, signal, sys, time
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader
from accel_data import prepare_loader
from accel_state.collectives import tensors as collectives; from accel_state import Session
from accel_state.parallelism.config import DataShard

rank, store, wait, end = int(sys.argv[1]), *sys.argv[2:]
address = "file://" + store
if wait == "adopted":
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=2)
session = Session.open(cpu=True, init_method=address)

class Deadly:
    def __len__(self):
        return 64

    def __getitem__(self, index):
        while index == 24 and not os.path.exists(store + ".inside"):
            time.sleep(0.01)
        if index == 24:
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.tensor([float(index)])

loader = prepare_loader(DataLoader(Deadly(), batch_size=4, num_workers=1), DataShard(rank, 2))
try:
    for step, batch in enumerate(loader):
        if rank == 1 and step == 3:
            open(store + ".inside", "w").close()
        if wait == "raw":
            dist.all_reduce(batch)
        else:
            collectives.gather(batch)
except Exception as error:
    print(type(error).__name__, error, file=sys.stderr, flush=True)
    deadline = time.monotonic() + 60
    while end == "stay" and rank == 0 and not os.path.exists(store + ".told") and time.monotonic() < deadline:
        time.sleep(0.05)
    open(store + ".told", "w").close()
    raise
"""


@pytest.mark.sampled(1)
@pytest.mark.fault
@pytest.mark.parametrize(
    ("wait", "end", "raised"),
    [
        ("adopted", "leave", "CollectiveError rank 0 could not read its next batch: DataError: 1 of"),
        pytest.param("gather", "stay", "CollectiveError rank 0 will not come to gather", marks=pytest.mark.slow),
        ("raw", "leave", "RuntimeError"),
    ],
    ids=["no watchdog", "one that lives", "torch's own"],
)
def test_a_rank_inside_a_collective_ends_with_what_kept_the_other_one_from_coming(tmp_path, wait, end, raised):
    place = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", WAITING, str(rank), str(tmp_path / "store"), wait, end],
            env={**os.environ, **place, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said = [rank.communicate(timeout=120)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    lines = said[1].splitlines()
    first = next((number for number, line in enumerate(lines) if line.startswith(raised)), len(lines))
    cause = "DataError: 1 of the DataLoader's 1 workers died"
    assert any(cause in line for line in lines[first:]), "\n".join(lines)
    assert sum("rank 0 will not come" in line for line in lines if line.startswith("[rank1]")) <= 1


class Rows(IterableDataset):
    """The same twelve rows on every rank."""

    def __iter__(self):
        return iter(range(12))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dataset", ["dispatched", "stream"])
def test_a_loader_connects_again_and_beside_groups_that_one_rank_made(rank, world_size, dataset):
    options = LoaderOptions(dispatch_batches=True) if dataset == "dispatched" else None
    source = Numbers(12) if dataset == "dispatched" else Rows()
    for _ in range(3):
        if rank == 0:
            dist.new_group([0], use_local_synchronization=True)
        reading = DataLoader(source, batch_size=2)
        shard = DataShard(rank, world_size)
        loader = prepare_loader(reading, shard, options=options, session_group=dist.group.WORLD)
        assert sorted(together([batch.tolist() for batch in loader])) == list(range(12))
        del loader
        gc.collect()


@pytest.mark.ranks(2)
def test_a_rank_that_waits_for_one_that_failed_says_why(rank, world_size):
    loader = make(rank, world_size)
    alarm = loader._alarm.watch()
    if rank == 0:
        alarm.tell(OSError("the disk is gone"))
    else:
        deadline = time.monotonic() + 60
        while alarm.heard is None:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        with pytest.raises(DataError, match="rank 0 could not read its next batch: OSError: the disk is gone"):
            list(alarm.heeding(iter([1, 2])))


@pytest.mark.slow
@pytest.mark.fault
@pytest.mark.ranks(2)
def test_a_dead_worker_of_the_rank_that_reads_for_all_is_an_error_on_every_rank(rank, world_size):
    loader = DataLoader(Deadly(rank, kills=True), batch_size=3, num_workers=1)
    loader = prepare_loader(loader, DataShard(rank, world_size), options=LoaderOptions(dispatch_batches=True))
    with pytest.raises(DataError, match=r"workers died|rank 0 could not read batch"):
        list(loader)


class Named(Numbers):
    def __init__(self, size, name):
        super().__init__(size)
        self.fingerprint = name


def saved_in_the_middle(rank, ranks, dataset, **kwargs):
    loader = prepare_loader(DataLoader(dataset, batch_size=3, **kwargs), DataShard(rank, ranks))
    next(iter(loader))
    return loader.state_dict()


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("change", "dataset", "message"),
    [
        ({}, ("a", SIZE - 1), "53 samples, this one has 52"),
        ({}, ("b", SIZE), "fingerprint 'a', this one has 'b'"),
        ({"version": 2}, ("a", SIZE), "version 2; this accel-data reads versions up to 1"),
        ({"samples": SIZE + 1}, ("a", SIZE), "sample 54, but an epoch has 53"),
    ],
)
def test_a_state_that_does_not_fit_is_refused_on_every_rank(rank, world_size, change, dataset, message):
    state = {**saved_in_the_middle(rank, world_size, Named(SIZE, "a"), shuffle=True), **change}
    loader = DataLoader(Named(dataset[1], dataset[0]), batch_size=3, shuffle=True)
    loader = prepare_loader(loader, DataShard(rank, world_size))
    with pytest.raises(DataStateError, match=message):
        loader.load_state_dict(state)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("whole", [False, True])
def test_an_index_outside_of_the_dataset_is_named_on_every_rank_before_it_is_read(rank, world_size, whole):
    indices = [*range(8), SIZE, 9]
    sampling = {"batch_sampler": [indices[:5], indices[5:]]} if whole else {"sampler": indices, "batch_size": 2}
    loader = prepare_loader(DataLoader(Numbers(), **sampling), DataShard(rank, world_size))
    with pytest.raises(DataError, match="index 53, but the dataset has 53 samples"):
        list(loader)


@pytest.mark.ranks(2)
def test_a_batch_that_cannot_be_split_is_refused_on_every_rank(rank, world_size):
    with pytest.raises(ConfigError, match="3 is not a multiple of 2"):
        make(rank, world_size, options=LoaderOptions(split_batches=True))


def test_a_pretended_group_has_nobody_to_tell():
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=1, world_size=4, store=FakeStore())
    try:
        loader = make(1, 4, options=LoaderOptions(data_seed=1))
        assert loader._alarm is None
        assert len(list(loader)) == len(loader)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("shard", [DataShard(0, 2), DataShard(1, 2), DataShard(2, 4)])
def test_a_rank_without_the_others_reads_its_own_shard(shard):
    """Whichever it is: neighbours have different data where the data axis is not the outermost one."""
    open_fake_group(1, 4)
    try:
        shared = connect(make(1, 4), shard, None)
        assert shared.parts[1] == shard.index
        assert set(shared.parts) == set(range(shard.count))
    finally:
        dist.destroy_process_group()

"""Positions of streams: states of earlier versions load, and one that means nothing here is refused."""

from itertools import pairwise

import pytest
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from accel_data import LoaderOptions, prepare_loader
from accel_data.iterable.resume import Readers, StreamPosition, resume
from accel_data.order.cursor import Cursor
from accel_state.errors import DataStateError
from accel_state.parallelism.config import DataShard

pytestmark = pytest.mark.filterwarnings("ignore:every reader of")
SIZES = [5, 3, 14, 6]


class Files(IterableDataset):
    """Files of different lengths, dealt out to ranks and workers."""

    def __init__(self, files):
        self.files, self.num_shards = files, len(files)

    def shard(self, num_shards, index):
        return Files(self.files[index::num_shards])

    def __iter__(self):
        info = get_worker_info()
        mine = self.files if info is None else self.files[info.id :: info.num_workers]
        return (element for file in mine for element in file)


def prepared(ranks, workers, *, given=False, rank=0):
    """The loader of one rank."""
    bounds = [sum(SIZES[:number]) for number in range(len(SIZES) + 1)]
    dataset = Files([list(range(begin, end)) for begin, end in pairwise(bounds)])
    options = LoaderOptions(dispatch_batches=False, even_batches=False, already_sharded=given)
    loader = DataLoader(dataset.shard(ranks, rank) if given else dataset, batch_size=2, num_workers=workers)
    return prepare_loader(loader, DataShard(rank, ranks), options=options)


def state(samples, source, **private):
    return {
        "version": 1,
        "epoch": 0,
        "samples": samples,
        "source": {"kind": "stream", "level": True, **source},
        **({"private": private} if private else {}),
    }


LEFT = {"shards": 2, "workers": 1, "chunk": 2, "taken": [6, 6], "turn": 0, "samples": 12, "seated": False}
TWO = {"shards": 1, "workers": 2, "chunk": 2, "taken": [4, 2], "turn": 1, "samples": 6, "seated": True}
WORKERS = {"index": 0, "workers": 2, "positions": [4, 2], "snapshots": [None, None], "turn": 1}
RANK = {"index": 0, "workers": 0, "positions": [6], "snapshots": [None], "turn": 0}
# As version 0.1.0 wrote them before streams were a sub-package, and the batches that it then delivered.
SAVED = {
    "one stream": (
        (1, 0),
        state(6, {"mode": "stride", "splits_itself": False, "shards": 1, "workers": 0}),
        [[6, 7], [8, 9], [10, 11], [12, 13], [14, 15], [16, 17], [18, 19], [20, 21], [22, 23], [24, 25], [26, 27]],
    ),
    "worker streams": (
        (1, 2),
        state(
            6, {"mode": "stride", "splits_itself": True, "shards": 1, "workers": 2, "left": TWO}, shards=1, **WORKERS
        ),
        [[7, 22], [4, 8], [23, 24], [9, 10], [25, 26], [11, 12], [27], [13, 14], [15, 16], [17, 18], [19, 20], [21]],
    ),
    "shards": (
        (2, 0),
        state(
            12, {"mode": "native", "splits_itself": False, "shards": 2, "workers": 0, "left": LEFT}, shards=2, **RANK
        ),
        [[9, 10], [11, 12], [13, 14], [15, 16], [17, 18], [19, 20], [21]],
    ),
    "shards of workers": (
        (2, 2),
        state(12, {"mode": "native", "splits_itself": True, "shards": 2, "workers": 2}, shards=2, **WORKERS),
        [[10, 11], [4], [12, 13], [14, 15], [16, 17], [18, 19], [20, 21]],
    ),
    "sharded before": (
        (2, 0, True),
        state(12, {"mode": "given", "splits_itself": False, "shards": 2, "workers": 0}, shards=2, **RANK),
        [[9, 10], [11, 12], [13, 14], [15, 16], [17, 18], [19, 20], [21]],
    ),
    "sharded before, of workers": (
        (2, 2, True),
        state(12, {"mode": "given", "splits_itself": True, "shards": 2, "workers": 2}, shards=2, **WORKERS),
        [[10, 11], [4], [12, 13], [14, 15], [16, 17], [18, 19], [20, 21]],
    ),
    "merged stream": (
        (3, 0),
        state(18, {"mode": "left", "splits_itself": False, "shards": 3, "workers": 0, "left": LEFT}),
        [[27, 13], [18, 19]],
    ),
}


@pytest.mark.parametrize("name", SAVED)
def test_a_state_of_an_earlier_version_goes_on_where_that_version_would(name):
    (ranks, workers, *given), saved, expected = SAVED[name]
    loader = prepared(ranks, workers, given=bool(given))
    loader.load_state_dict(saved)
    assert [batch.tolist() for batch in loader] == expected
    assert loader._source.strategy.name == name


@pytest.mark.parametrize("name", [name for name in SAVED if name != "merged stream"])
def test_states_have_the_keys_and_values_that_earlier_versions_wrote(name):
    (ranks, workers, *given), saved, _ = SAVED[name]
    loader = prepared(ranks, workers, given=bool(given))
    passing = iter(loader)
    for _ in range(3):
        next(passing)
    assert loader.state_dict() == saved


@pytest.mark.parametrize(
    ("record", "private", "here", "words"),
    [
        ({"kind": "map"}, None, Readers(1, 0, 0), "'map' loader"),
        ({"mode": "native", "shards": 4}, None, Readers(2, 0, 0), "resume with 4 ranks"),
        ({"mode": "given", "shards": 4}, {"shards": 4, "index": 0}, Readers(2, 0, 0), "resume with 4 ranks"),
        (
            {"mode": "stride", "splits_itself": True, "shards": 1, "workers": 2},
            {"shards": 1, "index": 0, "workers": 2},
            Readers(1, 0, 3),
            "resume with 1 ranks with 2 workers",
        ),
        ({"mode": "native", "shards": 2, "splits_itself": True, "workers": 2}, None, Readers(2, 0, 2), "own state"),
    ],
)
def test_a_position_that_means_nothing_here_is_refused_with_what_works(record, private, here, words):
    with pytest.raises(DataStateError) as caught:
        resume(StreamPosition.load(record, Cursor(1, 24), private), here)
    assert words in str(caught.value)
    assert "set_epoch" in str(caught.value) or "map" in words


def test_ranks_whose_shards_were_read_unequally_agree_on_the_position_without_messages():
    """As left by ranks that had a group, the stream of one of which had ended: 5 and 6 elements are delivered."""
    source = {"mode": "native", "splits_itself": False, "shards": 2, "workers": 0, "level": False}
    saved = state(11, source | {"left": LEFT | {"taken": [5, 6], "samples": 11}})
    states = []
    for rank in range(2):
        loader = prepared(2, 0, rank=rank)
        loader.load_state_dict(saved)
        passing = iter(loader)
        next(passing)
        states.append({name: value for name, value in loader.state_dict().items() if name != "private"})
    assert states[0] == states[1]
    assert (states[0]["samples"], states[0]["source"]["level"]) == (15, False)

"""The road from a DataLoader to a prepared loader, counted in changes of module."""

import gc
import sys
from collections.abc import Callable
from types import FrameType

import pytest
from torch.utils.data import DataLoader, Dataset, IterableDataset

from accel_data import LoaderOptions, prepare_loader
from accel_state.parallelism.config import DataShard


class Samples(Dataset[int]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        return index


class Elements(IterableDataset[int]):
    def __iter__(self):
        return iter(range(8))


def stations(prepare: Callable[[], object]) -> list[str]:
    """The modules of accel_data whose functions are called, in order; neighbours of one module count once."""
    found: list[str] = []

    def note(frame: FrameType, event: str, argument: object) -> None:
        module = frame.f_globals.get("__name__", "")
        if event == "call" and module.startswith("accel_data.") and found[-1:] != [module]:
            found.append(module)

    prepare()  # modules that are imported on the way
    before = sys.getprofile()
    gc.disable()  # a collection would call finalizers of loaders that other tests left
    sys.setprofile(note)
    try:
        prepare()
    finally:
        sys.setprofile(before)
        gc.enable()
    return found


@pytest.mark.parametrize(
    ("loader", "shard", "dispatched"),
    [
        (DataLoader(Samples(), batch_size=2, shuffle=True), DataShard(), None),
        (DataLoader(Elements(), batch_size=2), DataShard(0, 2), None),
        (DataLoader(Elements(), batch_size=2), DataShard(0, 2), True),
    ],
    ids=["map", "stream", "dispatched stream"],
)
def test_preparation_walks_forward(loader, shard, dispatched):
    options = LoaderOptions(dispatch_batches=dispatched)
    passed = stations(lambda: prepare_loader(loader, shard, options=options))
    assert passed[0] == "accel_data.prepare"
    assert "accel_data.loader" in passed
    returns = len(passed) - len(set(passed))
    assert len(passed) <= 27, passed
    assert returns <= 9, passed

"""Placement of batches: what moves, what stays the same object, and that streams do not race."""

import pickle
from collections import UserDict, namedtuple
from dataclasses import dataclass

import pytest
import torch

from accel_data.device.prefetch import AsIs, Direct, SideStream, placer_for
from accel_state.pytree.operations import find_device

CPU = torch.device("cpu")
META = torch.device("meta")
Pair = namedtuple("Pair", "x name")


@dataclass
class Example:
    x: torch.Tensor
    name: str


class Movable:
    """A batch class of some library: it only has ``.to(device)``."""

    def __init__(self, device):
        self.device = device

    def to(self, device):
        return Movable(device)


BATCHES = [
    torch.ones(2),
    [torch.ones(2), "a", 1],
    {"x": torch.ones(2), "y": [torch.ones(1), None]},
    UserDict(x=torch.ones(2)),
    Pair(torch.ones(2), "a"),
    Example(torch.ones(2), "a"),
    (torch.ones(1), {"deep": (torch.ones(1),)}),
    ["only", "strings"],
]


@pytest.mark.parametrize("batch", BATCHES, ids=lambda batch: type(batch).__name__)
@pytest.mark.parametrize(
    "placer", [AsIs(), Direct(CPU), placer_for(CPU), placer_for(None)], ids=lambda p: type(p).__name__
)
def test_what_is_in_place_is_handed_on_as_the_same_object(batch, placer):
    assert placer.start(batch).take() is batch


@pytest.mark.parametrize("batch", BATCHES[:-1], ids=lambda batch: type(batch).__name__)
def test_every_tensor_moves_and_containers_keep_their_type(batch):
    placed = Direct(META).start(batch).take()
    assert type(placed) is type(batch)
    assert find_device(placed) == META
    assert Direct(META).start(placed).take() is placed


def test_other_leaves_are_untouched():
    name = "a name"
    placed = Direct(META).start({"x": torch.ones(1), "name": name, "n": 3}).take()
    assert placed["name"] is name
    assert placed["n"] == 3


def test_objects_that_can_move_are_asked_to():
    assert Direct(META).start([Movable(CPU)]).take()[0].device == META


@pytest.mark.parametrize("placer", [AsIs(), Direct(CPU, non_blocking=True), SideStream(torch.device("cuda", 0))])
def test_placers_pickle_without_their_stream(placer):
    assert type(pickle.loads(pickle.dumps(placer))) is type(placer)


def test_a_device_without_streams_is_placed_directly():
    placer = placer_for(META, non_blocking=True)
    assert isinstance(placer, Direct)
    assert placer.non_blocking


@pytest.mark.gpu
def test_batches_taken_late_and_dropped_early_are_never_overwritten():
    device = torch.device(torch.accelerator.current_accelerator().type, torch.accelerator.current_device_index())
    placer = placer_for(device)
    assert isinstance(placer, SideStream)
    weights = torch.randn(2048, 2048, device=device)
    sums = []
    pending = placer.start({"x": torch.full((2048, 2048), 0.0), "n": 0})
    for step in range(1, 40):
        following = placer.start({"x": torch.full((2048, 2048), float(step)), "n": step})
        batch = pending.take()
        for _ in range(5):  # keeps the current stream busy, so that reuse of the batch's memory would be seen
            weights = torch.tanh(weights @ weights)
        sums.append((batch["n"], batch["x"].mean()))
        del batch
        pending = following
    assert [value.item() for _, value in sums] == [float(n) for n, _ in sums]


@pytest.mark.gpu
def test_a_batch_on_the_device_is_handed_on_as_the_same_object():
    device = torch.device(torch.accelerator.current_accelerator().type)
    batch = {"x": torch.ones(2, device=device)}
    assert placer_for(device).start(batch).take() is batch

"""Placement of batches: what moves, what stays the same object, and that streams do not race."""

import pickle
import threading
from collections import UserDict, namedtuple
from dataclasses import dataclass

import pytest
import torch
from torch.utils.data import DataLoader

from accel_data import prepare_loader
from accel_data.device.prefetch import AsIs, Direct, SideStream, placer_for
from accel_state import DataShard
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


class Stream:
    """A stream of no device: ``torch.Stream`` needs an accelerator."""

    def __init__(self, *_):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def record_event(self):
        return self

    def wait_event(self, event):
        assert isinstance(event, Stream)


@pytest.fixture
def pinned(monkeypatch):
    """The threads that pin, and an event for which pinning waits; copies go to the meta device."""
    threads, may_pin = [], threading.Event()

    def pin_memory(tensor):
        assert may_pin.wait(20)
        threads.append(threading.current_thread())
        return tensor

    monkeypatch.setattr(torch, "Stream", Stream)
    monkeypatch.setattr(torch.accelerator, "current_stream", Stream)
    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
    monkeypatch.setattr("accel_data.device.prefetch.has_streams", lambda device: True)
    return threads, may_pin


def test_a_large_batch_is_pinned_while_the_step_goes_on(pinned):
    threads, may_pin = pinned
    placed = placer_for(META, reused=False).start({"x": torch.ones(2**18), "n": 3})
    assert not threads
    may_pin.set()
    batch = placed.take()
    assert (batch["x"].device, batch["n"]) == (META, 3)
    assert threads[0].name.startswith("accel-pin-memory")


@pytest.mark.parametrize(("size", "reused"), [(2**18, True), (2**18 - 1, False)])
def test_small_batches_and_those_in_reused_memory_are_pinned_before_the_next_is_read(pinned, size, reused):
    threads, may_pin = pinned
    may_pin.set()
    placed = placer_for(META, reused=reused).start(torch.ones(size))
    assert threads == [threading.current_thread()]
    assert placed.take().device == META


def test_an_error_of_the_thread_that_pins_reaches_the_loop(pinned, monkeypatch):
    def fail(tensor):
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(torch.Tensor, "pin_memory", fail)
    placed = placer_for(META, reused=False).start(torch.ones(2**18))
    with pytest.raises(RuntimeError, match="out of memory"):
        placed.take()


@pytest.mark.parametrize("workers", [0, 1])
def test_a_thread_pins_what_workers_have_read(pinned, workers):
    threads, may_pin = pinned
    may_pin.set()
    user = DataLoader(torch.ones(3, 2**18), num_workers=workers)
    batches = list(prepare_loader(user, DataShard(), device=META))
    assert [batch.shape for batch in batches] == [(1, 2**18)] * 3
    here = threading.current_thread()
    assert [thread is here for thread in threads] == [workers == 0] * 3


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

"""Random numbers that can be seeded, saved without pickle, derived and shared."""

import hashlib
import json
import random

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from accel_state import CheckpointMismatchError, Session, Topology
from accel_state.enums import BaseEnum
from accel_state.rng import (
    Determinism,
    derive_seed,
    rng_state,
    set_deterministic,
    set_rng_state,
    set_seed,
    synchronize_rng_state,
    synchronize_rng_states,
)


class Kind(BaseEnum):
    """Generators as members of an enumeration, whose texts count."""

    TORCH = "torch"
    GENERATOR = "generator"


def draw():
    """Numbers of every global generator, an odd number of normal ones: those come in pairs and leave one behind."""
    return [
        random.random(),
        random.gauss(0, 1),
        float(numpy.random.rand()),
        float(numpy.random.randn()),
        torch.rand(3).tolist(),
        torch.randn(3).tolist(),
    ]


@pytest.fixture(autouse=True)
def undisturbed():
    before, switches = rng_state(), Determinism.current()
    yield
    set_rng_state({**rng_state(), **before})  # an accelerator that a test used first has no state before it
    switches.restore()


@pytest.mark.parametrize("seed", [0, 42, 2**32 + 1, 2**63 - 1])
def test_the_same_seed_gives_the_same_numbers(seed):
    set_seed(seed)
    first = draw()
    set_seed(seed)
    assert draw() == first
    set_seed(seed + 1)
    assert all(a != b for a, b in zip(draw(), first, strict=True))


def test_a_device_specific_seed_adds_the_rank():
    set_seed(7 + 3)
    expected = draw()
    topology = Topology(rank=3, world_size=4)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr("accel_state.session.current_topology", lambda: topology)
        set_seed(7, device_specific=True)
    assert draw() == expected


@pytest.mark.ranks(2)
def test_ranks_draw_their_own_numbers_when_told(rank):
    with Session.open(cpu=True):
        set_seed(7, device_specific=True)
        mine = draw()
    set_seed(7 + rank)
    assert draw() == mine


def test_determinism_is_undone_on_request():
    before = Determinism.current()
    undo = set_seed(1, deterministic=True)
    assert torch.are_deterministic_algorithms_enabled()
    assert torch.backends.cudnn.deterministic
    assert not torch.backends.cudnn.benchmark
    undo.restore()
    assert Determinism.current() == before == undo


def test_restoring_goes_back_one_step():
    set_deterministic()
    inner = set_deterministic()
    inner.restore()
    assert torch.are_deterministic_algorithms_enabled()


def json_or_tensors(value):
    if isinstance(value, dict):
        return all(isinstance(key, str) and json_or_tensors(one) for key, one in value.items())
    if isinstance(value, list):
        return all(json_or_tensors(one) for one in value)
    return isinstance(value, torch.Tensor) or value is None or type(value) in (int, float, str, bool)


@pytest.mark.parametrize("drawn", [0, 1, 5])
def test_a_restored_state_continues_the_streams(drawn):
    set_seed(3)
    for _ in range(drawn):
        draw()
    state = rng_state()
    expected = [draw(), draw()]
    assert set_rng_state(state) == []
    assert [draw(), draw()] == expected
    assert json_or_tensors(state)


def test_a_saved_state_does_not_move_on():
    state = rng_state()
    before = state["torch"].clone()
    draw()
    assert torch.equal(state["torch"], before)


@pytest.mark.parametrize("part", ["python", "numpy", "torch"])
def test_a_missing_part_is_named_and_nothing_is_restored(part):
    state = {name: value for name, value in rng_state().items() if name != part}
    draw()
    moved = rng_state()
    with pytest.raises(CheckpointMismatchError, match=f"'{part}' is missing from the saved state"):
        set_rng_state(state)
    assert torch.equal(rng_state()["torch"], moved["torch"])
    assert set_rng_state(state, strict=False) == [part]


@pytest.mark.parametrize("part", ["device", "quantum"])
def test_a_part_without_a_generator_here_is_named(part):
    state = rng_state() | {part: {"type": "cuda", "current": 0, "states": [torch.zeros(16, dtype=torch.uint8)]}}
    with Session.open(cpu=True):
        with pytest.raises(
            CheckpointMismatchError, match=f"'{part}' was saved, but this process has no such generator"
        ):
            set_rng_state(state)
        assert set_rng_state(state, strict=False) == [part]


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("python", {"version": 3, "words": torch.zeros(3, dtype=torch.int64), "gauss": None}),
        ("python", {"version": 2, "words": torch.zeros(625, dtype=torch.int64), "gauss": None}),
        ("python", {"words": torch.zeros(625, dtype=torch.int64)}),
        ("numpy", {"key": torch.zeros(3, dtype=torch.int64), "pos": 0, "has_gauss": 0, "gauss": 0.0}),
        ("numpy", None),
        ("torch", torch.zeros(3, dtype=torch.uint8)),
        ("torch", "text"),
    ],
)
def test_a_malformed_part_is_named_before_anything_is_restored(part, value):
    state = rng_state()
    draw()
    moved = random.getstate()
    with pytest.raises(CheckpointMismatchError, match=f"'{part}' is malformed"):
        set_rng_state(state | {part: value})
    assert random.getstate() == moved


def test_another_numpy_generator_is_refused_by_name():
    before = numpy.random.get_bit_generator()
    numpy.random.set_bit_generator(numpy.random.PCG64(1))
    try:
        with pytest.raises(CheckpointMismatchError, match=r"PCG64.*expected MT19937"):
            rng_state()
    finally:
        numpy.random.set_bit_generator(before)


@pytest.mark.gpu
def test_the_accelerator_is_seeded_saved_and_restored():
    device = torch.accelerator.current_accelerator()
    set_seed(5)
    first = torch.rand(3, device=device).tolist()
    state = rng_state()
    second = torch.rand(3, device=device).tolist()
    set_rng_state(state)
    assert torch.rand(3, device=device).tolist() == second
    set_seed(5)
    assert torch.rand(3, device=device).tolist() == first
    assert state["device"]["type"] == device.type
    assert len(state["device"]["states"]) == torch.accelerator.device_count()


class FakeDevice:
    """A device of a type of its own, with a generator whose state is one number."""

    type = "abacus"

    def __init__(self, number):
        self.state = torch.tensor([number])

    def rng_state(self):
        return self.state

    def set_rng_state(self, state):
        self.state = state


@pytest.mark.parametrize(
    ("count", "now", "expected"),
    [
        pytest.param(3, 1, [0, 1, 2], id="same device"),
        pytest.param(3, 0, [1, 0, 2], id="another device"),
        pytest.param(2, 0, [1, 9], id="fewer devices"),
    ],
)
def test_the_stream_of_a_process_goes_with_it_to_another_device(count, now, expected, monkeypatch):
    monkeypatch.setattr("accel_state.rng._devices", lambda: [FakeDevice(number) for number in range(3)])
    monkeypatch.setattr("accel_state.rng._current", lambda devices: 1)
    state = rng_state()
    here = [FakeDevice(9) for _ in range(count)]
    monkeypatch.setattr("accel_state.rng._devices", lambda: here)
    monkeypatch.setattr("accel_state.rng._current", lambda devices: now)
    set_rng_state(state)
    assert [int(device.state) for device in here] == expected
    monkeypatch.undo()


@pytest.mark.parametrize(
    ("seed", "keys", "expected"),
    [
        (0, (), 5817701917209559351),
        (42, (1,), 5452191887476804941),
        (42, ("1",), 4541920528152122338),
        (-5, (3, "worker", 2**70), 4527405567996864278),
        (42, ("ä",), 1136949733581088440),
    ],
)
def test_a_derived_seed_never_changes(seed, keys, expected):
    assert derive_seed(seed, *keys) == expected


@given(st.integers(), st.lists(st.one_of(st.integers(), st.text()), max_size=4))
def test_a_derived_seed_is_what_its_description_says(seed, keys):
    text = json.dumps([seed, *keys], separators=(",", ":"))
    number = int(hashlib.sha256(text.encode("ascii")).hexdigest()[:16], 16)
    assert derive_seed(seed, *keys) == number % 2**63
    torch.Generator().manual_seed(derive_seed(seed, *keys))


@given(st.integers(0, 1000), st.integers(0, 1000))
def test_ranks_derive_different_seeds(seed, rank):
    assert len({derive_seed(seed, rank), derive_seed(seed, rank + 1), derive_seed(seed + 1, rank)}) == 3


@pytest.mark.parametrize("key", [1.5, None, True, (1,)])
def test_only_integers_and_strings_are_keys(key):
    with pytest.raises(TypeError, match="integers and strings"):
        derive_seed(1, key)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", ["torch", Kind.TORCH, "python", "numpy", None])
def test_a_synchronised_generator_draws_what_rank_0_draws(rank, kind):
    set_seed(rank)
    synchronize_rng_state(kind)
    mine = draw()
    set_seed(0)
    expected = draw()
    names = {"python": slice(0, 2), "numpy": slice(2, 4)}
    assert mine[names.get(kind, slice(4, 6))] == expected[names.get(kind, slice(4, 6))]
    assert (mine == expected) == (rank == 0)


@pytest.mark.ranks(2)
def test_a_generator_of_ones_own_is_synchronised(rank):
    generators = [torch.Generator().manual_seed(rank), torch.Generator().manual_seed(rank + 10)]
    synchronize_rng_states(["torch", Kind.GENERATOR], generators[0])
    synchronize_rng_state(generator=generators[1])
    assert torch.rand(1, generator=generators[0]) == torch.rand(1, generator=torch.Generator().manual_seed(0))
    assert torch.rand(1, generator=generators[1]) == torch.rand(1, generator=torch.Generator().manual_seed(10))


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("generator", "give that torch.Generator"),
        ("quantum", "unknown .* 'quantum'; known: torch"),
        ("hpu", "'hpu'.* no such device"),
    ],
)
def test_a_generator_that_is_not_there_is_named(kind, text):
    with pytest.raises(ValueError, match=text):
        synchronize_rng_state(kind)

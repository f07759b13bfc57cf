"""Functions of device types: each row of the table brings its own, and nothing else asks for the type."""

import sys
from types import SimpleNamespace

import pytest
import torch

from accel_state import DEVICE_KINDS, ConfigError, Device, DeviceKind, DeviceMemory, Topology
from accel_state.device.functions import DeviceFunctions
from accel_state.device.memory import clear_device_cache
from accel_state.rng import set_seed


class Counter(DeviceFunctions):
    """Two devices that remember what was called."""

    def __init__(self):
        self.calls = []

    def count(self, kind):
        return 2

    def memory(self, kind, index):
        return DeviceMemory(index, 7)

    def synchronize(self, kind, index):
        self.calls.append(("synchronize", index))

    def empty_used_cache(self, kind):
        self.calls.append("empty")

    def seed(self, seed):
        self.calls.append(("seed", seed))


def test_a_row_is_all_that_a_device_type_needs(monkeypatch):
    functions = Counter()
    monkeypatch.setitem(DEVICE_KINDS, "abacus", DeviceKind("abacus", "gloo", functions=functions))
    chosen = Device.choose(Topology.on_one_node(1, 2), asked="abacus", env={})
    assert chosen == Device("abacus", 1)
    assert chosen.memory() == DeviceMemory(1, 7)
    chosen.synchronize()
    clear_device_cache()
    set_seed(3)
    assert functions.calls == [("synchronize", 1), "empty", ("seed", 3)]


def test_types_with_one_device_and_types_with_bound_collectives():
    assert {kind.type for kind in DEVICE_KINDS.values() if not kind.functions.indexed} == {"cpu", "mps", "xla"}
    assert {kind.type for kind in DEVICE_KINDS.values() if kind.bound} == {"cuda", "xpu"}


@pytest.mark.parametrize("kind", [kind for kind in DEVICE_KINDS.values() if kind.plugin], ids=lambda kind: kind.type)
def test_asking_whether_a_type_is_present_imports_no_missing_package(kind):
    before = set(sys.modules)
    if kind.functions.is_present(kind, {}):
        pytest.skip(f"this machine has {kind.type}")
    assert not {name for name in set(sys.modules) - before if name.partition(".")[0].startswith("torch_")}


def test_the_generator_of_xla_is_seeded_and_kept_as_64_bits(monkeypatch):
    """torch_xla needs its devices, so a stand-in holds the seed."""
    seeds = [0]
    model = SimpleNamespace(set_rng_state=lambda seed: seeds.append(seed), get_rng_state=lambda: seeds[-1])
    monkeypatch.setitem(sys.modules, "torch_xla.core.xla_model", model)
    set_seed(2**64 - 1 - 2**63)
    xla = DEVICE_KINDS["xla"]
    seeds.append(2**64 - 1)
    state = xla.functions.rng_state(xla, None)
    assert (state.dtype, state.item()) == (torch.int64, -1)
    xla.functions.set_rng_state(xla, None, state)
    assert seeds == [0, 2**63 - 1, 2**64 - 1, 2**64 - 1]


def test_a_type_that_no_package_adds_is_named():
    kind = DeviceKind("abacus", "gloo")
    with pytest.raises(ConfigError, match=r"did not add torch\.abacus"):
        kind.functions.module(kind)

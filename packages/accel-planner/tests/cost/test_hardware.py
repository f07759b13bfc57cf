"""Hardware: what is understood as a description of devices, and what is refused."""

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accel_planner import Hardware, parse_size
from accel_state import DEVICE_KINDS, ConfigError, Device, DeviceKind, Topology
from accel_state.device.functions import DeviceFunctions

GB = 10**9


@pytest.mark.parametrize(
    ("text", "nodes", "devices", "memory"),
    [
        ("8x80GB", 1, 8, 80 * GB),
        ("80GiB", 1, 1, 80 * 2**30),
        ("2x8x80GB", 2, 8, 80 * GB),
        (" 4 x 24 gb ", 1, 4, 24 * GB),
        ("8*1.5TB", 1, 8, 1500 * GB),
        ("8xH100", 1, 8, 79 * 2**30),
        ("2x8xMI300X", 2, 8, 191 * 2**30),
    ],
)
def test_hardware_is_read_as_people_write_it(text: str, nodes: int, devices: int, memory: int) -> None:
    hardware = Hardware.parse(text)
    assert (hardware.nodes, hardware.devices, hardware.memory) == (nodes, devices, memory)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "not understood"),
        ("8x", "not understood"),
        ("8x80GX", "did you mean G"),
        ("0x80GB", "no number of devices"),
        ("ax80GB", "neither a size nor one of"),
        ("8x80Gb/x", "is no size"),
        ("8x80qb", "did you mean"),
        ("8x0GB", "is nothing"),
        ("8xH10", "did you mean H100"),
        ("1x2x3x80GB", "not understood"),
        ("eight", "neither a size nor one of"),
        ("8xRTX4090", "'RTX4090' in devices '8xRTX4090' is neither a size nor one of V100, .*H100"),
        ("2x8xMI325X", "'MI325X' in devices '2x8xMI325X' is neither a size nor one of"),
        ("8", "as in 8x80GB or 8xH100"),
        ("2x8", "say nothing of a device's memory"),
    ],
)
def test_nonsense_hardware_is_refused_with_what_would_work(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Hardware.parse(text)


def test_nodes_are_said_once() -> None:
    assert Hardware.parse("8x80GB", nodes=2).ranks == 16
    with pytest.raises(ConfigError, match="say 2 nodes, and nodes=3"):
        Hardware.parse("2x8x80GB", nodes=3)


@given(st.integers(1, 10**6), st.sampled_from(["B", "kB", "MB", "GB", "TB", "KiB", "MiB", "GiB", "TiB"]))
def test_sizes_come_back_as_bytes(number: int, unit: str) -> None:
    base, power = (1024, "KMGT".index(unit[0]) + 1) if "i" in unit else (1000, "BkMGT".index(unit[0]))
    assert parse_size(f"{number}{unit}") == number * base**power


@pytest.mark.parametrize(
    ("name", "flops", "link"),
    [("NVIDIA H100 80GB HBM3", 989e12, 450e9), ("NVIDIA L40", 181e12, 32e9), ("NVIDIA GeForce RTX 4090", None, None)],
)
def test_a_detected_product_has_the_rates_of_the_one_table(
    name: str, flops: float | None, link: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Functions(DeviceFunctions):
        def module(self, kind: DeviceKind) -> SimpleNamespace:
            return SimpleNamespace(get_device_name=lambda index: name, mem_get_info=lambda index: (1, 7))

    monkeypatch.setitem(DEVICE_KINDS, "abacus", DeviceKind("abacus", "gloo", functions=Functions()))
    session: Any = SimpleNamespace(device=Device("abacus", 1), topology=Topology.on_one_node(1, 2))
    found = Hardware.detect(session)
    assert (found.devices, found.memory, found.kind) == (2, 7, "abacus")
    guessed = Hardware()
    assert (found.flops, found.local) == (
        (guessed.flops, guessed.local) if flops is None or link is None else (flops * 0.45, link * 0.75)
    )

"""Products are known by the words of the names that devices give themselves."""

from types import SimpleNamespace

import pytest

from accel_state import DEVICE_KINDS, Device, DeviceKind
from accel_state.device.functions import DeviceFunctions
from accel_state.device.products import PRODUCTS, product_of


@pytest.mark.parametrize(
    ("name", "product"),
    [
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA L40", "L40"),
        ("NVIDIA A100-SXM4-40GB", "A100-40GB"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", None),
        ("NVIDIA H100 PCIe", "H100-PCIE"),
        ("NVIDIA H100 NVL", "H100-NVL"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA GH200 480GB", "GH200"),
        ("NVIDIA GB200", "GB200"),
        ("Tesla T4", "T4"),
        ("AMD Instinct MI300X", "MI300X"),
        ("AMD Instinct MI250X / MI250", "MI250X"),
        ("NVIDIA GeForce RTX 4090", None),
        ("", None),
    ],
)
def test_a_product_is_known_by_the_words_of_the_devices_name(name, product):
    assert product_of(name) is (None if product is None else PRODUCTS[product])


def test_a_device_is_named_and_its_allocator_summarised_by_its_own_module(monkeypatch):
    class Functions(DeviceFunctions):
        def module(self, kind):
            return SimpleNamespace(
                get_device_name=lambda index=9: f"Abacus {index}", memory_summary=lambda index=9: f"beads of {index}"
            )

    monkeypatch.setitem(DEVICE_KINDS, "abacus", DeviceKind("abacus", "gloo", functions=Functions()))
    assert [Device("abacus", index).product_name() for index in (None, 0, 1)] == ["Abacus 9", "Abacus 0", "Abacus 1"]
    assert Device("abacus", 1).memory_summary() == "beads of 1"


def test_types_that_name_no_product_have_an_empty_one(monkeypatch):
    class Functions(DeviceFunctions):
        def module(self, kind):
            return SimpleNamespace()

    monkeypatch.setitem(DEVICE_KINDS, "abacus", DeviceKind("abacus", "gloo", functions=Functions()))
    assert [(device.product_name(), device.memory_summary()) for device in (Device("abacus", 0), Device("cpu"))] == [
        ("", ""),
        ("", ""),
    ]

import time

import pytest
import torch

from accel_precision import DeviceFacts, PrecisionPolicy


def test_a_cpu_is_found_to_compute_what_it_computes():
    facts = DeviceFacts.probe("cpu")
    assert {torch.float32, torch.float64, torch.bfloat16} <= facts.computes
    assert torch.bfloat16 in facts.autocasts
    assert not facts.fp8


def test_fp16_is_allowed_on_a_cpu_exactly_where_autocast_computes_it():
    a = torch.ones(2, 2)
    with torch.autocast("cpu", dtype=torch.float16):
        computes = (a @ a).dtype is torch.float16
    assert (torch.float16 in DeviceFacts.probe("cpu").autocasts) is computes
    if computes:
        assert PrecisionPolicy.parse("fp16", device_type="cpu").scaling == "dynamic"


@pytest.mark.parametrize("device_type", ["xla", "meta"])
def test_devices_that_cannot_be_probed_are_described(device_type):
    assert DeviceFacts.probe(device_type).type == device_type


def test_probing_a_cpu_takes_no_time_that_anyone_would_notice():
    DeviceFacts.probe("cpu")
    start = time.thread_time()  # in which a machine that is busy with others does not count
    DeviceFacts.probe("cpu")
    assert time.thread_time() - start < 0.05


def test_no_precision_probes_nothing(monkeypatch):
    monkeypatch.setattr(DeviceFacts, "probe", classmethod(lambda cls, device_type: pytest.fail("probed")))
    assert PrecisionPolicy.parse("no", device_type="cpu") == PrecisionPolicy()


@pytest.mark.parametrize(("arch", "has"), [("gfx90a", False), ("gfx942", True), ("gfx950", True), ("gfx1201", True)])
def test_amd_gpus_have_fp8_from_these_generations_on(monkeypatch, arch, has):
    from types import SimpleNamespace

    from accel_precision.facts import _has_fp8

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: SimpleNamespace(gcnArchName=arch))
    assert _has_fp8("cuda") is has

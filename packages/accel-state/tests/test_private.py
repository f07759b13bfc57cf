"""Private names of torch: their fallbacks give what the names give."""

import pytest
import torch
import torch.distributed as dist

from accel_state import private
from accel_state.process_group.group import default_group

TENSORS = [torch.arange(6.0).view(2, 3), torch.zeros(0, 2), torch.ones(())]


@pytest.mark.parametrize("tensors", [TENSORS, TENSORS[:1]], ids=["several", "one"])
def test_buffers_are_the_same_without_torchs_functions(monkeypatch, tensors):
    flat = private.flatten(tensors)
    views = private.unflatten(flat, tensors)
    monkeypatch.setattr(private, "_FLATTEN", None)
    monkeypatch.setattr(private, "_UNFLATTEN", None)
    assert torch.equal(private.flatten(tensors), flat)
    for one, other in zip(private.unflatten(flat, tensors), views, strict=True):
        assert torch.equal(one.flatten(), other.flatten())
        assert one.data_ptr() == other.data_ptr()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("helped", [True, False], ids=["with the helper", "without"])
def test_a_group_opens_and_is_known_until_it_is_destroyed(monkeypatch, rank, helped):
    if not helped:
        monkeypatch.setattr(private, "_OF_GROUPS", ("_absent",) * 4)
    group = private.new_group([0, 1], rank, dist.Backend("gloo"), "private/test", None)
    assert private.is_open(group)
    assert len(private.backends_by_device(group)) >= 1
    total = torch.ones(1)
    dist.all_reduce(total, group=group)
    assert total.item() == 2
    dist.destroy_process_group(group)
    assert not private.is_open(group)
    assert private.is_open(default_group())


def test_a_torch_without_the_default_store_is_named(monkeypatch):
    monkeypatch.delattr(dist.distributed_c10d, "_get_default_store")
    with pytest.raises(ImportError, match=r"torch 2\.9 to 2\.13"):
        private.default_store()


def test_a_group_without_backends_by_device_has_none():
    assert private.backends_by_device(object()) == []
    assert private.timeout_of(object()) is None

"""Private names of torch: their fallbacks give what the names give."""

import subprocess
import sys

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
    with pytest.raises(ImportError, match=r"torch 2\.9 to 2\.15"):
        private.default_store()


def test_a_group_without_backends_by_device_has_none():
    assert private.backends_by_device(object()) == []
    assert private.timeout_of(object()) is None


def test_methods_are_excluded_from_tracing_and_import_no_compiler() -> None:
    script = (
        "import sys\nfrom accel_state.private import untraced\n"
        "add, multiply = untraced(lambda a: a + 1), untraced(lambda a: a * 5, callees=False)\n"
        "print(add(1), multiply(1), 'torch._dynamo' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["2", "5", "False"], done.stderr


@pytest.mark.parametrize("without", [False, True], ids=["as it is", "without _disable_dynamo"])
def test_a_compiled_function_calls_what_is_excluded(monkeypatch: pytest.MonkeyPatch, without: bool) -> None:
    if without:
        monkeypatch.delattr(torch, "_disable_dynamo")
    traced = []

    @private.untraced
    def note(x: torch.Tensor) -> torch.Tensor:
        traced.append(torch.compiler.is_compiling())
        return 2 * x

    compiled = torch.compile(lambda x: note(x + 1) + 1, backend="eager")
    assert compiled(torch.ones(2)).tolist() == [5.0, 5.0]
    assert compiled(torch.ones(2)).tolist() == [5.0, 5.0]
    assert traced == [False, False]

"""Private names of DeepSpeed and torch: this DeepSpeed has them, and without them there is a fallback or a refusal."""

from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from accel_deepspeed import private
from accel_deepspeed.library import library
from accel_deepspeed.tensor_parallel.autotp import Layers
from accel_state.errors import BackendError

pytestmark = pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed")


@pytest.fixture
def deepspeed() -> Any:
    return library("cpu")


def test_this_deepspeed_has_every_name(deepspeed):
    from deepspeed.runtime.zero import partition_parameters
    from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer as Stage12
    from deepspeed.utils import groups

    wanted = [
        (deepspeed.DeepSpeedEngine, ["_backward_prologue", "_backward_prologue_per_tensor", "_backward_epilogue"]),
        (partition_parameters.InsertPostInitMethodToModuleSubClasses, ["_set_dtype"]),
        (groups, ["_init_tp_mesh_device", "_release_process_group_references"]),
        (PartitionedParameterCoordinator, [private._GATHER]),
        (Stage12, ["_link_all_hp_params", "_get_compact_grad_partition_slice"]),
    ]
    assert [name for owner, names in wanted for name in names if not hasattr(owner, name)] == []
    assert private._RUNNING in deepspeed.DeepSpeedEngine.__init__.__code__.co_names  # an attribute of instances


@pytest.mark.parametrize("name", ["_backward_prologue", "_backward_prologue_per_tensor", "_backward_epilogue"])
def test_a_deepspeed_without_a_needed_name_is_refused_by_name(deepspeed, monkeypatch, name):
    monkeypatch.delattr(deepspeed.DeepSpeedEngine, name)
    with pytest.raises(BackendError, match=rf"has no DeepSpeedEngine.{name}, .* install deepspeed 0\.19\.8"):
        library("cpu")


def test_engines_that_do_not_say_whether_a_backward_runs_are_refused():
    engine = SimpleNamespace(_backward_prologue=None)
    with pytest.raises(BackendError, match=r"has no DeepSpeedEngine._running_engine_backward, .* 0\.19\.8"):
        private.replace_prologues(engine, lambda: None, lambda gradient: gradient)
    assert vars(engine) == {"_backward_prologue": None}


@pytest.mark.parametrize("there", [True, False])
@pytest.mark.parametrize("asserts", [True, False])
def test_groups_of_another_size_are_refused_only_if_there_are_groups(deepspeed, monkeypatch, there, asserts):
    """Without groups DeepSpeed fails an assertion, or under ``python -O`` returns None, and the size of the world."""
    from deepspeed.utils import groups

    if there:
        monkeypatch.setattr(groups, "get_tensor_model_parallel_group", object)
    elif not asserts:
        monkeypatch.setattr(groups, "get_tensor_model_parallel_group", lambda: None)
    monkeypatch.setattr(groups, "get_tensor_model_parallel_world_size", lambda: 2)
    layers = Layers(SimpleNamespace(world_size=2), 1)
    if there:
        with pytest.raises(BackendError, match="have tensor-parallel groups of 2 ranks"):
            layers.open()
    else:
        layers.open()


def test_tensor_parallel_groups_need_the_name(deepspeed, monkeypatch):
    from deepspeed.utils import groups

    monkeypatch.delattr(groups, "_init_tp_mesh_device")
    with pytest.raises(BackendError, match=r"tensor-parallel groups in another way; install deepspeed 0\.19\.8"):
        private.open_tensor_parallel_groups(2)


def test_references_may_stay(deepspeed, monkeypatch):
    from deepspeed.utils import groups

    monkeypatch.delattr(groups, "_release_process_group_references")
    private.forget_groups()
    assert not hasattr(groups, "_release_process_group_references")


def test_partitions_keep_the_dtype_that_was_given(deepspeed, monkeypatch):
    from deepspeed.accelerator import get_accelerator
    from deepspeed.runtime.zero.partition_parameters import InsertPostInitMethodToModuleSubClasses as Owner

    monkeypatch.setattr(get_accelerator(), "is_fp16_supported", lambda: False)
    assert Owner(dtype=torch.float32).dtype is torch.bfloat16
    with private.partitioned_as_given():
        assert Owner(dtype=torch.float32).dtype is torch.float32
    assert Owner(dtype=torch.float32).dtype is torch.bfloat16
    monkeypatch.delattr(Owner, "_set_dtype")
    with private.partitioned_as_given():
        assert not hasattr(Owner, "_set_dtype")


@pytest.mark.parametrize("links", [True, False])
def test_memory_is_shared_if_the_records_can_be_made_anew(links):
    linked: list[bool] = []
    optimizer = SimpleNamespace(single_partition_of_fp32_groups=[torch.ones(2), torch.ones(2)])
    if links:
        optimizer._link_all_hp_params = lambda: linked.append(True)
    own = [torch.zeros(2), torch.zeros(2, dtype=torch.bfloat16)]
    private.share_memory(optimizer, own)
    same = [
        flat.data_ptr() == here.data_ptr()
        for flat, here in zip(optimizer.single_partition_of_fp32_groups, own, strict=True)
    ]
    assert (same, linked) == ([links, False], [True] if links else [])


def test_all_gathers_of_another_deepspeed_are_left_alone():
    coordinator = SimpleNamespace()
    assert private.replace_gathers(coordinator, lambda: None) is None
    private.restore_gathers(coordinator)
    assert vars(coordinator) == {}


def test_a_window_is_not_resumed_by_another_deepspeed():
    with pytest.raises(BackendError, match=r"window can be resumed; install deepspeed 0\.19\.8"):
        private.partition_slice(SimpleNamespace(), 0, 0, 0, 1)


@pytest.mark.parametrize("known", [True, False])
def test_a_backward_that_accumulates_is_told_from_one_that_does_not(monkeypatch, known):
    if not known:
        monkeypatch.delattr(torch._C, "_will_engine_execute_node")
    parameter, found = nn.Parameter(torch.ones(1)), []
    for accumulates in (True, False):
        loss = (parameter * 2).sum()
        loss.register_hook(lambda _: found.append(private.is_accumulating([parameter])))
        if accumulates:
            loss.backward()
        else:
            torch.autograd.grad(loss, parameter)
    assert found == [True, not known]

"""Sharding options from calls, the environment, names, numbers and torch's objects."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from accel_backends import FullyShardedDataParallelPlugin as Plugin
from accel_backends.core.option_parsing import AutoWrap, BackwardPrefetch, FullStateForm, ShardingLevel, StateDictKind
from accel_state import ConfigError


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    for name in list(os.environ):
        if name.startswith("FSDP_"):
            monkeypatch.delenv(name)


def torch_enum() -> Any:
    from torch.distributed.fsdp import ShardingStrategy

    return ShardingStrategy


@pytest.mark.parametrize("number", range(1, 6))
def test_a_strategy_goes_by_number_name_text_or_torchs_member(number: int) -> None:
    kind = list(torch_enum())[number - 1]
    name = kind.name.lstrip("_")
    for given_as in (number, str(number), name, name.lower(), kind):
        assert Plugin(sharding_strategy=given_as).sharding_strategy is ShardingLevel[name]


def sharded_offload() -> Any:
    from torch.distributed.fsdp import ShardedStateDictConfig

    return ShardedStateDictConfig(offload_to_cpu=True)


ENVIRONMENT = {
    "sharding_strategy": ("SHARDING_STRATEGY", "SHARD_GRAD_OP", ShardingLevel.SHARD_GRAD_OP),
    "reshard_after_forward": ("RESHARD_AFTER_FORWARD", "false", False),
    "cpu_offload": ("OFFLOAD_PARAMS", "true", True),
    "backward_prefetch": ("BACKWARD_PREFETCH", "NO_PREFETCH", BackwardPrefetch.NO_PREFETCH),
    "forward_prefetch": ("FORWARD_PREFETCH", "true", 1),
    "auto_wrap_policy": ("AUTO_WRAP_POLICY", "SIZE_BASED_WRAP", AutoWrap.SIZE_BASED_WRAP),
    "min_num_params": ("MIN_NUM_PARAMS", "2000", 2000),
    "transformer_cls_names_to_wrap": ("TRANSFORMER_CLS_TO_WRAP", "A, B", ["A", "B"]),
    "state_dict_type": ("STATE_DICT_TYPE", "FULL_STATE_DICT", StateDictKind.FULL_STATE_DICT),
    "activation_checkpointing": ("ACTIVATION_CHECKPOINTING", "1", True),
    "cpu_ram_efficient_loading": ("CPU_RAM_EFFICIENT_LOADING", "true", True),
    "ignored_modules": ("IGNORED_MODULES", "head", "head"),
    "sync_module_states": ("SYNC_MODULE_STATES", "no", False),
    "fsdp_version": ("VERSION", "1", 1),
    "use_orig_params": ("USE_ORIG_PARAMS", "false", False),
}


@pytest.mark.parametrize("field", list(ENVIRONMENT))
def test_what_is_not_given_is_read_from_the_environment(monkeypatch: pytest.MonkeyPatch, field: str) -> None:
    variable, text, value = ENVIRONMENT[field]
    monkeypatch.setenv(f"FSDP_{variable}", text)
    assert getattr(Plugin(), field) == value


def test_offloaded_activations_are_asked_for_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FSDP_ACTIVATION_CHECKPOINTING", "true")
    monkeypatch.setenv("FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD", "true")
    assert Plugin().activation_checkpointing_offload is True


@pytest.mark.parametrize("kind", ["FullStateDictConfig", "FullOptimStateDictConfig"])
def test_torchs_forms_of_full_states_are_taken(kind: str) -> None:
    import torch.distributed.fsdp as fsdp

    given = getattr(fsdp, kind)(offload_to_cpu=False, rank0_only=True)
    plugin = Plugin(state_dict_config=given, optim_state_dict_config={"rank0_only": "false"})
    assert plugin.state_form == FullStateForm(offload_to_cpu=False, rank0_only=True)
    assert plugin.optimizer_state_form == FullStateForm(offload_to_cpu=True, rank0_only=False)
    assert Plugin(state_dict_config=fsdp.ShardedStateDictConfig()).state_form == FullStateForm()


def test_numbers_and_switches_may_be_texts() -> None:
    plugin = Plugin(shard_size="2", find_unused_parameters="true", limit_all_gathers="no")
    assert (plugin.shard_size, plugin.find_unused_parameters, plugin.limit_all_gathers) == (2, True, False)


def test_version_1_has_no_use_for_one_process() -> None:
    from accel_backends import select_backend
    from accel_state import Device, Topology

    device = Device("cpu", None)
    assert select_backend(Topology(), device, Plugin(fsdp_version=1)).name == "single"
    assert select_backend(Topology(), device, Plugin(fsdp_version=2)).name == "fsdp"


def test_what_is_given_wins_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FSDP_SHARDING_STRATEGY", "NO_SHARD")
    monkeypatch.setenv("FSDP_OFFLOAD_PARAMS", "true")
    plugin = Plugin(sharding_strategy="HYBRID_SHARD", cpu_offload=False)
    assert (plugin.sharding_strategy, plugin.cpu_offload) == (ShardingLevel.HYBRID_SHARD, False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sharding_strategy": "FUL_SHARD"}, "did you mean FULL_SHARD"),
        ({"sharding_strategy": "auto", "fsdp_version": 1}, "'auto' compares strategies of version 2; nearest: fsdp_v"),
        ({"sharding_strategy": "auto", "reshard_after_forward": True}, "'auto' chooses reshard_after_forward, too"),
        ({"sharding_strategy": "auto", "shard_size": 2}, "'auto' chooses shard_size, too; leave it out"),
        ({"sharding_strategy": 7}, r"sharding_strategy=7 is not one of .*\(or 1 to 5\)"),
        ({"reshard_after_forward": "FULL_SHARD"}, "not supported with FSDP2.*nearest: sharding_strategy='FULL_SHARD'"),
        ({"reshard_after_forward": True, "fsdp_version": 1}, "not supported with FSDP1.*'FULL_SHARD'"),
        ({"backward_prefetch": "BACKWARD_POST"}, "BACKWARD_POST is not supported in FSDP2; nearest: BACKWARD_PRE"),
        ({"state_dict_type": "LOCAL_STATE_DICT"}, "nearest: SHARDED_STATE_DICT"),
        ({"auto_wrap_policy": "TRANSFORMER_WRAP"}, "did you mean TRANSFORMER_BASED_WRAP"),
        ({"activation_checkpointing_offload": True}, "needs activation_checkpointing=True"),
        ({"min_num_params": "many"}, "min_num_params='many'; expected a whole number"),
        ({"mixed_precision_policy": {"param_dtyp": "bf16"}}, "did you mean 'param_dtype'"),
        ({"mixed_precision_policy": {"param_dtype": "bf61"}}, "did you mean 'bf16'"),
        ({"mixed_precision_policy": "bf61"}, "did you mean 'bf16'"),
        ({"fsdp_version": 3}, "expected 2"),
        ({"cpu_offload": "perhaps"}, "expected true or false"),
        ({"cpu_ram_efficient_loading": True, "sync_module_states": False}, "needs sync_module_states=True"),
        ({"use_orig_params": False, "fsdp_version": 1}, "nearest: use_orig_params=True"),
        ({"transformer_cls_names_to_wrap": "A", "auto_wrap_policy": "NO_WRAP"}, "nearest: TRANSFORMER_BASED_WRAP"),
        ({"shard_size": 0}, "it counts ranks"),
        ({"shard_size": "two"}, "expected a whole number"),
        ({"state_dict_config": {"offload_to_cp": True}}, "did you mean 'offload_to_cpu'"),
        ({"optim_state_dict_config": "full"}, "is a str; expected a mapping of offload_to_cpu, rank0_only"),
        ({"state_dict_config": sharded_offload()}, "sharded states stay where their parameters are"),
    ],
)
def test_what_means_nothing_is_refused_with_what_would(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Plugin(**options)


def test_a_name_that_is_no_field_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'cpu_offload'"):
        Plugin.build({"cpu_ofload": True})


def test_torchs_own_objects_are_taken() -> None:
    from torch.distributed.fsdp import CPUOffload, CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
    from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy

    plugin = Plugin(cpu_offload=CPUOffloadPolicy(pin_memory=False), auto_wrap_policy=size_based_auto_wrap_policy)
    assert (plugin.cpu_offload, plugin.pin_memory) == (True, False)
    assert plugin.auto_wrap_policy is AutoWrap.SIZE_BASED_WRAP
    assert Plugin(cpu_offload=OffloadPolicy()).cpu_offload is False
    assert Plugin(cpu_offload=CPUOffload(offload_params=True), fsdp_version=1).cpu_offload is True
    dtypes = Plugin(mixed_precision_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)).dtypes
    assert dtypes == {"param_dtype": torch.bfloat16, "cast_forward_inputs": True}


def test_a_precision_by_name_sets_every_dtype_unless_they_are_set() -> None:
    plugin = Plugin()
    plugin.set_mixed_precision("bf16", buffer_autocast=True)
    assert plugin.dtypes["param_dtype"] == plugin.dtypes["reduce_dtype"] == torch.bfloat16
    assert plugin.dtypes["buffer_dtype"] == torch.float32
    plugin.set_mixed_precision("fp16")
    assert plugin.dtypes["param_dtype"] == torch.bfloat16
    plugin.set_mixed_precision("fp16", override=True)
    assert plugin.dtypes["param_dtype"] == torch.float16


@pytest.mark.parametrize(
    ("options", "local", "expected"),
    [
        ({}, 4, (1, 8)),
        ({"sharding_strategy": "NO_SHARD"}, 4, (8, 1)),
        ({"sharding_strategy": "HYBRID_SHARD"}, 4, (2, 4)),
        ({"sharding_strategy": "HYBRID_SHARD"}, 8, (1, 8)),
        ({"shard_size": 2}, 8, (4, 2)),
        ({"replicate_size": 4}, 8, (4, 2)),
        ({"shard_size": 4, "replicate_size": 2}, 8, (2, 4)),
    ],
)
def test_degrees_follow_from_strategy_and_machines(
    options: dict[str, Any], local: int, expected: tuple[int, int]
) -> None:
    assert Plugin(**options).degrees(8, local) == expected


@given(world=st.integers(1, 64), shard=st.integers(1, 64))
def test_degrees_multiply_to_the_number_of_ranks_or_are_refused(world: int, shard: int) -> None:
    if world % shard:
        with pytest.raises(ConfigError, match="sizes that divide it"):
            Plugin(shard_size=shard).degrees(world, world)
    else:
        assert Plugin(shard_size=shard).degrees(world, world) == (world // shard, shard)


@pytest.mark.parametrize(
    ("options", "reshard"),
    [
        ({}, True),
        ({"sharding_strategy": "SHARD_GRAD_OP"}, False),
        ({"sharding_strategy": 5}, False),
        ({"sharding_strategy": "SHARD_GRAD_OP", "reshard_after_forward": True}, True),
        ({"reshard_after_forward": "4"}, 4),
    ],
)
def test_resharding_follows_the_strategy_unless_given(options: dict[str, Any], reshard: bool | int) -> None:
    assert Plugin(**options).reshard == reshard


def test_reading_options_again_changes_nothing() -> None:
    plugin = Plugin(sharding_strategy=4, mixed_precision_policy="bf16", forward_prefetch=3, auto_wrap_policy="no_wrap")
    assert replace(plugin) == plugin


@pytest.mark.parametrize(("version", "name"), [(2, "fsdp"), ("1", "fsdp1")])
def test_the_version_names_the_backend(version: Any, name: str) -> None:
    assert Plugin(fsdp_version=version).backend == name


def test_unused_parameters_are_refused_by_a_torch_that_cannot_count_them(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.fsdp import FSDPModule

    from accel_backends.fsdp.shard import check_torch

    monkeypatch.delattr(FSDPModule, "set_reduce_scatter_unused_params", raising=False)  # as before torch 2.13
    check_torch(Plugin())
    with pytest.raises(ConfigError, match=r"needs torch 2\.13 or newer .*nearest: leave it out"):
        check_torch(Plugin(find_unused_parameters=True))

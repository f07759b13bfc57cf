"""One strategy from settings, plugins, a name and degrees: which it is, why, and which contradictions are named."""

import os
from typing import Any

import pytest

from accel.setup.build import facts_of
from accel.setup.resolve_strategy import ResolvedStrategy, requested, resolve
from accel_backends import BackendConfig, DDPConfig, FSDPConfig, installed_backends
from accel_launch.config import resolve_config
from accel_planner.auto import AutoStrategy
from accel_state import BackendError, ConfigError, ParallelismConfig, TopologyError, TorchTensorParallelPlugin
from accel_state.environment import clear_environment

PLUGINS = {"fsdp_plugin", "deepspeed_plugin", "deepspeed_plugins", "torch_tp_plugin"}
TP2 = TorchTensorParallelPlugin(tp_size=2)


def strategy_of(
    ranks: int = 2,
    env: dict[str, str] | None = None,
    handler: BackendConfig | None = None,
    degrees: ParallelismConfig | None = None,
    **call: Any,
) -> ResolvedStrategy:
    """The strategy of a call, from the variables of torchrun and of ``env`` alone; nothing is opened."""
    named = {"backend": call["strategy"]} if isinstance(call.get("strategy"), str) else {}
    variables = {"RANK": "0", "WORLD_SIZE": str(ranks), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": str(ranks)}
    with clear_environment():
        os.environ.update(variables, MASTER_ADDR="localhost", MASTER_PORT="1", ACCEL_USE_CPU="1", **(env or {}))
        config = resolve_config({"cpu": True, **named, **call.get("settings", {})}, os.environ)
        plugins = {name: value for name, value in call.items() if name in PLUGINS}
        request = requested(call.get("strategy"), plugins, config, handler)
        return resolve(request, facts_of(config, degrees))


@pytest.mark.parametrize(
    ("call", "backend", "sizes"),
    [
        ({}, "ddp", {"dp_replicate_size": 2}),
        ({"ranks": 1}, "single", {}),
        ({"strategy": "fsdp"}, "fsdp", {"dp_shard_size": 2}),
        ({"strategy": "fsdp1"}, "fsdp1", {"dp_shard_size": 2}),
        ({"strategy": FSDPConfig(sharding_strategy="NO_SHARD")}, "fsdp", {"dp_replicate_size": 2}),
        ({"fsdp_plugin": {"fsdp_version": 1}}, "fsdp1", {"dp_shard_size": 2}),
        ({"fsdp_plugin": {"fsdp_version": 1}, "ranks": 1}, "single", {}),
        ({"degrees": ParallelismConfig(dp_shard_size=2)}, "fsdp", {"dp_shard_size": 2}),
        ({"env": {"PARALLELISM_CONFIG_DP_SHARD_SIZE": "2"}}, "fsdp", {"dp_shard_size": 2}),
        ({"env": {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "1"}}, "fsdp1", {"dp_shard_size": 2}),
        ({"env": {"ACCELERATE_USE_DEEPSPEED": "true"}}, "deepspeed", {"dp_shard_size": 2}),
        ({"env": {"ACCELERATE_USE_FSDP": "true"}, "strategy": "ddp"}, "ddp", {"dp_replicate_size": 2}),
        ({"deepspeed_plugin": {"zero_stage": 0}}, "deepspeed", {"dp_replicate_size": 2}),
        (
            {"deepspeed_plugin": {}, "degrees": ParallelismConfig(tp_size=2), "ranks": 4},
            "deepspeed",
            {"tp_size": 2, "dp_shard_size": 2},
        ),
        ({"deepspeed_plugins": {"a": {"zero_stage": 0}, "b": {}}}, "deepspeed", {"dp_replicate_size": 2}),
        ({"degrees": ParallelismConfig(tp_size=2)}, "fsdp", {"tp_size": 2}),
        ({"torch_tp_plugin": TP2}, "fsdp", {"tp_size": 2}),
        ({"torch_tp_plugin": TP2, "degrees": ParallelismConfig(tp_size=2)}, "fsdp", {"tp_size": 2}),
        (
            {"torch_tp_plugin": TP2, "env": {"PARALLELISM_CONFIG_DP_SHARD_SIZE": "2"}, "ranks": 4},
            "fsdp",
            {"tp_size": 2, "dp_shard_size": 2},
        ),
        ({"torch_tp_plugin": TP2, "env": {"ACCELERATE_USE_FSDP": "true"}}, "fsdp", {"tp_size": 2}),
        ({"degrees": ParallelismConfig(cp_size=2)}, "fsdp", {"cp_size": 2, "cp_backend": "fsdp"}),
        ({"degrees": ParallelismConfig(sp_size=2)}, "fsdp", {"sp_size": 2, "sp_backend": "fsdp"}),
        ({"env": {"PARALLELISM_CONFIG_SP_SIZE": "2"}}, "fsdp", {"sp_size": 2, "sp_backend": "fsdp"}),
        ({"deepspeed_plugin": {}, "degrees": ParallelismConfig(sp_size=2)}, "deepspeed", {"sp_size": 2}),
        ({"strategy": "deepspeed", "degrees": ParallelismConfig(sp_size=2)}, "deepspeed", {"sp_size": 2}),
        ({"handler": DDPConfig(static_graph=True)}, "ddp", {"dp_replicate_size": 2}),
        ({"handler": DDPConfig(), "ranks": 1}, "single", {}),
    ],
)
def test_what_requests_a_strategy(call: dict[str, Any], backend: str, sizes: dict[str, int]) -> None:
    found = strategy_of(**call)
    assert found.choice.name == backend == found.resolution.config.backend
    assert found.resolution.parallelism == ParallelismConfig(**sizes)  # type: ignore[arg-type]
    assert found.choice.reasons
    assert found.auto is None


def test_the_degree_of_a_plugin_is_a_setting_with_its_origin() -> None:
    stated = strategy_of(torch_tp_plugin=TP2).resolution.implied["parallelism_config_tp_size"]
    assert (stated.value, stated.origin) == (2, "torch_tp_plugin (call)")


def test_options_of_a_handler_reach_the_backend_that_they_are_for() -> None:
    given = DDPConfig(static_graph=True)
    assert strategy_of(handler=given).resolution.config is given
    assert strategy_of(handler=given, strategy="ddp").resolution.config is given
    own = DDPConfig()
    assert strategy_of(handler=given, strategy=own).resolution.config is own


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ({"strategy": "ddp", "fsdp_plugin": {}}, "strategy='ddp' and fsdp_plugin, whose strategy is 'fsdp', were both"),
        ({"strategy": "fsdp", "fsdp_plugin": {"fsdp_version": 1}}, "'fsdp' and fsdp_plugin, whose strategy is 'fsdp1'"),
        (
            {"fsdp_plugin": {}, "deepspeed_plugin": {}},
            "fsdp_plugin, .*'fsdp', and deepspeed_plugin, .* were both",
        ),
        (
            {"deepspeed_plugin": {}, "deepspeed_plugins": {"a": {}}},
            "deepspeed_plugin, .* and deepspeed_plugins, .*",
        ),
        (
            {"strategy": FSDPConfig(), "fsdp_plugin": {}},
            "strategy='FSDPConfig', .* and fsdp_plugin, .* were both",
        ),
        ({"env": {"ACCEL_BACKEND": "ddp"}, "fsdp_plugin": {}}, r"backend='ddp' \(env ACCEL_BACKEND\) and fsdp_plugin"),
        (
            {"env": {"ACCEL_BACKEND": "ddp", "ACCELERATE_USE_FSDP": "1"}},
            r"backend='ddp' \(env ACCEL_BACKEND\) and use_fsdp \(env ACCELERATE_USE_FSDP\), whose strategy is 'fsdp'",
        ),
        ({"strategy": "auto", "fsdp_plugin": {}}, "strategy='auto' and fsdp_plugin"),
        ({"strategy": "auto", "degrees": ParallelismConfig(dp_shard_size=2)}, "'auto' chooses .*dp_shard_size=2"),
        ({"strategy": "fsdp", "handler": DDPConfig()}, "kwargs_handlers has DDPConfig, but the strategy is 'fsdp'"),
        (
            {"strategy": FSDPConfig(shard_size=2), "degrees": ParallelismConfig(dp_shard_size=4), "ranks": 4},
            "parallelism_config has dp_shard_size=4, and the sharding options shard_size=2",
        ),
        (
            {"settings": {"mixed_precision": "fp16"}, "deepspeed_plugin": {"bf16": {"enabled": True}}},
            r"mixed_precision is 'fp16' \(call\), and .*bf16.enabled says 'bf16'; make them agree",
        ),
        (
            {
                "env": {"PARALLELISM_CONFIG_SP_SIZE": "2"},
                "deepspeed_plugin": {"sequence_parallel_size": 4},
                "ranks": 4,
            },
            r"parallelism_config_sp_size is 2 \(env PARALLELISM_CONFIG_SP_SIZE\), and .*sequence_parallel_size says 4",
        ),
        (
            {"deepspeed_plugin": {}, "degrees": ParallelismConfig(sp_size=2, sp_backend="ring")},
            "sp_backend='ring', and the strategy that serves sp_size=2 is 'deepspeed'",
        ),
        ({"deepspeed_plugins": {}}, "deepspeed_plugins is empty"),
        (
            {"torch_tp_plugin": TP2, "degrees": ParallelismConfig(dp_shard_size=2)},
            r"tp_size=1 \(parallelism_config\), and torch_tp_plugin \(call\) says 2; make them agree",
        ),
        (
            {"torch_tp_plugin": TP2, "env": {"PARALLELISM_CONFIG_TP_SIZE": "4"}},
            r"parallelism_config_tp_size=4 \(env PARALLELISM_CONFIG_TP_SIZE\), and torch_tp_plugin \(call\) says 2",
        ),
        ({"torch_tp_plugin": 2}, r"torch_tp_plugin is 2; .*nearest: TorchTensorParallelPlugin\(tp_size=2\)"),
        ({"torch_tp_plugin": TP2, "strategy": "ddp"}, "tp_size=2: backend 'ddp' .*nearest: strategy='fsdp'"),
        (
            {"strategy": "ddp", "degrees": ParallelismConfig(pp_size=2)},
            "pp_size=2: backend 'ddp' .*; nearest: strategy='pipeline'",
        ),
        (
            {"strategy": "ddp", "degrees": ParallelismConfig(cp_size=2)},
            "cp_size=2: backend 'ddp' .*; nearest: strategy='fsdp'",
        ),
        (
            {"strategy": "ddp", "degrees": ParallelismConfig(sp_size=2)},
            "sp_size=2: backend 'ddp' .*; nearest: strategy='fsdp'",
        ),
        (
            {"strategy": "ddp", "degrees": ParallelismConfig(tp_size=2)},
            "tp_size=2: backend 'ddp' .*nearest: strategy='fsdp'",
        ),
        ({"strategy": "fsdp1", "degrees": ParallelismConfig(tp_size=2)}, "tp_size=2: fsdp_version=1 flattens"),
    ],
)
def test_contradictions_name_both_origins_or_the_nearest_that_works(call: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        strategy_of(**call)


def test_degrees_that_no_number_of_replicas_completes_are_refused_first() -> None:
    with pytest.raises(TopologyError, match="needs 3 processes"):
        strategy_of(degrees=ParallelismConfig(tp_size=3))


def test_a_backend_that_is_not_installed_is_named() -> None:
    if "megatron" in installed_backends():
        pytest.skip("megatron is installed here")
    with pytest.raises(BackendError, match=r"no backend 'megatron'; installed: .*ddp"):
        strategy_of(env={"ACCELERATE_USE_MEGATRON_LM": "true"})


def test_options_imply_settings_with_their_origin() -> None:
    implied = strategy_of(deepspeed_plugin={"gradient_accumulation_steps": 4}).resolution.implied
    said = implied["gradient_accumulation_steps"]
    assert (said.value, said.origin) == (4, "deepspeed_plugin gradient_accumulation_steps")
    variables = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"}
    config: Any = strategy_of(env=variables).resolution.config
    assert config.origins["zero_optimization.stage"] == "env ACCELERATE_DEEPSPEED_ZERO_STAGE (zero_stage)"


@pytest.mark.parametrize("call", [{"strategy": "auto"}, {"env": {"ACCEL_BACKEND": "auto"}}])
def test_a_planned_strategy_starts_with_a_backend_that_holds_until_prepare(call: dict[str, Any]) -> None:
    found = strategy_of(**call)
    assert found.choice.name == "ddp"
    assert "until a model is prepared" in str(found.choice)
    assert found.auto == AutoStrategy()


def test_options_with_an_open_value_are_planned_too() -> None:
    found = strategy_of(deepspeed_plugin={"zero_stage": "auto", "gradient_accumulation_steps": 2})
    assert found.choice.name == "ddp"
    assert found.auto is not None
    assert getattr(found.auto.among, "backend", None) == "deepspeed"
    assert found.resolution.implied["gradient_accumulation_steps"].value == 2

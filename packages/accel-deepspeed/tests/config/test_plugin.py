"""Sources of DeepSpeed's options, their precedence, and refusals; without DeepSpeed."""

import base64
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from accel_backends.core.config import StrategyFacts
from accel_deepspeed import DeepSpeedPlugin, HfDeepSpeedConfig
from accel_deepspeed.config.ds_json import find
from accel_deepspeed.config.resolve_auto import RunFacts, settle
from accel_precision import GradScalerKwargs, PrecisionPolicy
from accel_state import DeepSpeedSequenceParallelConfig, Device, ParallelismConfig, Topology
from accel_state.environment import patch_environment
from accel_state.errors import ConfigError

BF16 = PrecisionPolicy.Named["bf16"]
PLAIN = PrecisionPolicy()


def test_a_plain_mapping_is_enough() -> None:
    plugin = DeepSpeedPlugin.build({"zero_stage": 2, "offload_optimizer": False, "gradient_accumulation_steps": 4})
    assert (plugin.zero_stage, plugin.offload_optimizer_device) == (2, "none")
    assert plugin.resolve(facts()).implied["gradient_accumulation_steps"].value == 4
    assert find(plugin.deepspeed_config, "zero_optimization.stage") == 2


@pytest.mark.parametrize(
    ("value", "device"), [(True, "cpu"), (False, "none"), ("nvme", "nvme"), ({"device": "cpu", "ratio": 0.5}, "cpu")]
)
def test_offloading_is_a_switch_a_device_or_a_section(value: Any, device: str) -> None:
    path = {"offload_optimizer_nvme_path": "/disk"} if device == "nvme" else {}
    assert DeepSpeedPlugin.build({"offload_optimizer": value, **path}).offload_optimizer_device == device


@pytest.mark.parametrize("form", ["dict", "path", "text", "base64", "object"])
def test_the_configuration_comes_in_any_form(form: str, tmp_path: Path) -> None:
    document = {"zero_optimization": {"stage": 3}, "bf16": {"enabled": "auto"}}
    text = json.dumps(document)
    (tmp_path / "ds.json").write_text(text)
    given: Any = {
        "dict": document,
        "path": tmp_path / "ds.json",
        "text": text,
        "base64": base64.urlsafe_b64encode(text.encode()).decode(),
        "object": HfDeepSpeedConfig(document),
    }[form]
    plugin = DeepSpeedPlugin(hf_ds_config=given)
    assert plugin.zero_stage == 3
    assert plugin.zero3_init_flag is True
    assert plugin.is_auto("bf16.enabled")
    assert plugin.hf_ds_config.is_zero3()


def test_a_field_wins_over_its_variable_and_the_variable_over_the_default() -> None:
    with patch_environment(ACCELERATE_DEEPSPEED_ZERO_STAGE="3", ACCELERATE_GRADIENT_CLIPPING="0.5"):
        assert DeepSpeedPlugin().zero_stage == 3
        plugin = DeepSpeedPlugin(zero_stage=1)
    assert plugin.zero_stage == 1
    assert plugin.gradient_clipping == 0.5
    origins = {key: origin for key, _, origin in plugin.explain()}
    assert origins["zero_optimization.stage"] == "deepspeed_plugin zero_stage"
    assert origins["gradient_clipping"] == "environment ACCELERATE_GRADIENT_CLIPPING"


def test_a_given_environment_replaces_that_of_the_process_also_after_a_plan() -> None:
    given = {"ACCELERATE_GRADIENT_CLIPPING": "0.5", "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL": "true"}
    with patch_environment(ACCELERATE_DEEPSPEED_ZERO_STAGE="3", ACCELERATE_GRADIENT_CLIPPING="2.0"):
        plugin = DeepSpeedPlugin(environment=given)
        assert (plugin.zero_stage, plugin.gradient_clipping) == (2, 0.5)
        empty = DeepSpeedPlugin(environment={})
        assert (empty.zero_stage, empty.gradient_clipping) == (2, None)
        planned = DeepSpeedPlugin(zero_stage="auto", environment={})
        found = planned.resolve(replace(facts(2), plan={"zero_stage": 1})).config
    assert (found.zero_stage, found.gradient_clipping) == (1, None)
    assert dict((key, origin) for key, _, origin in found.explain())["zero_optimization.stage"] == "the planner"


def test_auto_counts_as_not_given() -> None:
    plugin = DeepSpeedPlugin(zero_stage=3, hf_ds_config={"zero_optimization": {"stage": "auto"}})
    assert find(plugin.deepspeed_config, "zero_optimization.stage") == 3


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "contradiction": ({"zero_stage": 1, "hf_ds_config": {"zero_optimization": {"stage": 2}}}, "zero_stage says 1"),
    "stage": ({"zero_stage": 4}, "nearest: 3"),
    "device": ({"offload_optimizer_device": "gpu"}, "expected none, cpu or nvme"),
    "offload_at_0": ({"zero_stage": 0, "offload_optimizer_device": "cpu"}, "needs zero_stage 1"),
    "parameters_at_2": ({"zero_stage": 2, "offload_param_device": "cpu"}, "needs zero_stage 3"),
    "nvme_without_path": ({"zero_stage": 3, "offload_optimizer_device": "nvme"}, "offload_optimizer_nvme_path"),
    "init_at_2": ({"zero_stage": 2, "zero3_init_flag": True}, "only stage 3"),
    "msamp": ({"enable_msamp": True}, "MS-AMP"),
    "clipping": ({"gradient_clipping": -1}, "expected a norm"),
    "steps": ({"gradient_accumulation_steps": 0}, "expected 1 or more"),
    "top_key": ({"hf_ds_config": {"zero_optimisation": {}}}, "did you mean 'zero_optimization'"),
    "zero_key": ({"hf_ds_config": {"zero_optimization": {"reduce_bucket": 1}}}, "reduce_bucket_size"),
    "mics": ({"hf_ds_config": {"zero_optimization": {"mics_shard_size": 2}}}, "zero_hpz_partition_size"),
    "no_file": ({"hf_ds_config": "none.json"}, "Expected a string path"),
    "type": ({"hf_ds_config": 3}, "type int"),
    "twice": ({"hf_ds_config": '{"bf16": {}, "bf16": {}}'}, "twice"),
    "both": ({"hf_ds_config": {"bf16": {"enabled": True}, "fp16": {"enabled": True}}}, "enable one"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_refused_with_what_can(case: str) -> None:
    options, message = REFUSED[case]
    with pytest.raises(ConfigError, match=message):
        DeepSpeedPlugin(**options).resolve(facts())


def test_an_unknown_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'zero_stage'"):
        DeepSpeedPlugin.build({"zero_stge": 1})


def settled(document: dict[str, Any], **run: Any) -> dict[str, Any]:
    plugin = DeepSpeedPlugin(hf_ds_config=document)
    return settle(plugin.deepspeed_config, RunFacts(**{"policy": PLAIN, "world_size": 2, **run}))[0]


def test_autos_follow_the_model_and_the_run() -> None:
    config = settled(
        {
            "train_micro_batch_size_per_gpu": "auto",
            "train_batch_size": "auto",
            "gradient_accumulation_steps": "auto",
            "gradient_clipping": "auto",
            "bf16": {"enabled": "auto"},
            "fp16": {"enabled": "auto"},
            "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}},
            "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": "auto", "warmup_num_steps": "auto"}},
            "zero_optimization": {
                "stage": 3,
                "reduce_bucket_size": "auto",
                "stage3_prefetch_bucket_size": "auto",
                "stage3_param_persistence_threshold": "auto",
            },
        },
        policy=BF16,
        hidden_size=16,
        batch_sizes=(8, 4),
        rates={"lr": 0.1, "weight_decay": 0.01},
        steps={"total_num_steps": 100, "warmup_num_steps": 0},
    )
    zero = config["zero_optimization"]
    assert (config["train_micro_batch_size_per_gpu"], config["train_batch_size"]) == (4, 8)
    assert config["gradient_accumulation_steps"] == 1  # the clock counts
    assert (config["bf16"]["enabled"], config["fp16"]["enabled"]) == (True, False)
    assert config["communication_data_type"] == "fp32"
    assert (zero["reduce_bucket_size"], zero["stage3_prefetch_bucket_size"]) == (256, 230)
    assert zero["stage3_param_persistence_threshold"] == 160
    assert config["optimizer"]["params"] == {"lr": 0.1, "weight_decay": 0.01}
    assert config["scheduler"]["params"] == {"warmup_max_lr": 0.1, "warmup_num_steps": 1}


def test_the_largest_batch_counts_where_it_was_asked_for() -> None:
    config = settled({"train_micro_batch_size_per_gpu": "auto"}, batch_sizes=(8, 4), smallest=False)
    assert config["train_micro_batch_size_per_gpu"] == 8


def test_batches_that_do_not_multiply_are_refused() -> None:
    with pytest.raises(ConfigError, match="make 16"):
        settled({"train_batch_size": 12, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2})


def test_an_auto_nobody_knows_is_left_to_deepspeed() -> None:
    assert (
        "reduce_bucket_size"
        not in settled({"zero_optimization": {"stage": 3, "reduce_bucket_size": "auto"}})["zero_optimization"]
    )


def test_buffers_are_no_larger_than_the_model() -> None:
    assert settled({"zero_optimization": {"stage": 2}}, elements=999)["zero_optimization"]["reduce_bucket_size"] == 1000


def test_a_scheduler_without_numbers_is_refused() -> None:
    document = {"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto"}}}
    with pytest.raises(ConfigError, match="total_num_steps"):
        settled(document, steps={"total_num_steps": None, "warmup_num_steps": None})


def test_precision_and_configuration_must_agree() -> None:
    with pytest.raises(ConfigError, match=r"bf16.enabled = false"):
        settled({"bf16": {"enabled": False}}, policy=BF16)


@pytest.mark.parametrize(
    ("sections", "precision"),
    [
        ({"bf16": True}, "bf16"),
        ({"bfloat16": True, "fp16": False}, "bf16"),
        ({"bf16": False, "fp16": True}, "fp16"),
        ({"bf16": False, "fp16": False}, "no"),
        ({"bfloat16": False, "fp16": False}, "no"),
        ({"fp16": False}, None),
        ({}, None),
    ],
)
def test_sections_of_the_configuration_say_a_precision(sections: dict[str, bool], precision: str | None) -> None:
    plugin = DeepSpeedPlugin(hf_ds_config={name: {"enabled": on} for name, on in sections.items()})
    said = plugin.resolve(facts()).implied.get("mixed_precision")
    assert (said.value if said else None) == precision


def test_loss_scale_options_reach_deepspeed() -> None:
    scaler = GradScalerKwargs(init_scale=1024.0, growth_interval=10)
    config = settled({}, policy=PrecisionPolicy.Named["fp16"], scaler=scaler)
    assert config["fp16"] == {"enabled": True, "initial_scale_power": 10, "loss_scale_window": 10, "hysteresis": 1}


def test_fill_match_fills_and_compares() -> None:
    plugin = DeepSpeedPlugin(hf_ds_config={"optimizer": {"params": {"lr": "auto", "eps": 1}}})
    plugin.fill_match("optimizer.params.lr", **{"optimizer.params.lr": 0.5})
    assert plugin.get_value("optimizer.params.lr") == 0.5
    with pytest.raises(ConfigError, match=r"optimizer.params.eps=1 vs arg optimizer.params.eps=2"):
        plugin.deepspeed_config_process(**{"optimizer.params.eps": 2})
    with pytest.raises(ConfigError, match="not found in kwargs"):
        DeepSpeedPlugin(hf_ds_config={"train_batch_size": "auto"}).deepspeed_config_process()


def test_setting_the_precision_refuses_the_other() -> None:
    plugin = DeepSpeedPlugin(hf_ds_config={"fp16": {"enabled": True}})
    with pytest.raises(ConfigError, match="cannot be set to `bf16`"):
        plugin.set_mixed_precision("bf16")


def test_what_deepspeed_would_make_groups_of_is_taken_out() -> None:
    """Its own reduce over one of the degrees only; the type in which they send is the one for all."""
    document = {"sequence_parallel_size": 2, "data_parallel_size": 2, "seq_parallel_communication_data_type": "bf16"}
    config = settled({**document, "train_micro_batch_size_per_gpu": 3})
    assert "data_parallel_size" not in config
    assert (config["communication_data_type"], config["train_batch_size"]) == ("bf16", 6)
    with pytest.raises(ConfigError, match="data_parallel_size is 4, and batches are spread over 2 ranks"):
        settled({"sequence_parallel_size": 2, "data_parallel_size": 4})


def facts(world_size: int = 2, **degrees: int) -> StrategyFacts:
    """A run on CPUs; the given degrees, and no other, are requested by a call."""
    topology = Topology(world_size=world_size, local_world_size=world_size)
    if not degrees:
        return StrategyFacts(topology, Device("cpu"))
    return StrategyFacts(topology, Device("cpu"), ParallelismConfig(**degrees), frozenset())  # type: ignore[arg-type]


def test_plugins_of_one_run_have_the_degrees_of_the_run() -> None:
    plugins = DeepSpeedPlugin.several({"a": {"sequence_parallel_size": 2}, "b": {"zero_stage": 3}})
    handler = DeepSpeedSequenceParallelConfig(sp_attn_implementation="sdpa")
    run = replace(facts(4), parallelism=ParallelismConfig(sp_size=2, sp_handler=handler), open_axes=frozenset())
    found = plugins.resolve(run)
    assert [(one.sequence_parallel_size, one.sequence_attention) for one in found.config.plugins.values()] == [
        (2, "sdpa"),
        (2, "sdpa"),
    ]
    assert found.config is found.config.plugins["a"]
    assert (found.parallelism.size("sp"), found.parallelism.size("dp_shard")) == (2, 2)
    with pytest.raises(ConfigError, match="parallelism_config has sp_size=4, and"):
        plugins.resolve(facts(4, sp_size=4))
    other = DeepSpeedPlugin.several({"a": {"sequence_parallel_size": 2}, "b": {"sequence_parallel_size": 4}})
    with pytest.raises(ConfigError, match="one run has one"):
        other.resolve(facts(4))


def test_resolving_leaves_the_users_options_as_they_are() -> None:
    plugins = DeepSpeedPlugin.several({"a": {"tensor_parallel": {"autotp_size": 2}}, "b": {}})
    found = plugins.resolve(facts(2, tp_size=2))
    assert [one.tensor_parallel_size for one in found.config.plugins.values()] == [2, 2]
    assert [one.tensor_parallel_size for one in plugins.plugins.values()] == [2, 1]
    assert found.implied["parallelism_config_tp_size"].value == 2
    with pytest.raises(ConfigError, match=r"parallelism_config has tp_size=1, and .*autotp_size = 2"):
        plugins.resolve(facts(2, dp_replicate_size=2))
    plain = DeepSpeedPlugin(zero_stage=1)
    assert plain.resolve(facts(2)).config is plain


def test_degrees_of_the_configuration_count_where_no_other_is_given() -> None:
    own = DeepSpeedPlugin.build({"tensor_parallel": {"autotp_size": 2}})
    assert own.resolve(facts(4)).parallelism == ParallelismConfig(tp_size=2, dp_shard_size=2)
    assert DeepSpeedPlugin(zero_stage=0).resolve(facts(4)).parallelism == ParallelismConfig(dp_replicate_size=4)
    with pytest.raises(ConfigError, match="DeepSpeed has sequence or tensor parallelism, not both"):
        own.resolve(facts(4, sp_size=2, tp_size=2))


def test_the_planners_choice_completes_what_is_open() -> None:
    plugin = DeepSpeedPlugin(zero_stage="auto", offload_optimizer_device="cpu")
    assert plugin.planned
    with_plan = replace(facts(2), plan={"zero_stage": 3, "offload_optimizer_device": "cpu"})
    found = plugin.resolve(with_plan).config
    assert (found.zero_stage, found.planned) == (3, False)
    with pytest.raises(ConfigError, match=r"the planner chose offload_optimizer_device='none', and .* says 'cpu'"):
        plugin.resolve(replace(with_plan, plan={"zero_stage": 3}))


def test_what_is_told_of_shared_layers_goes_to_the_engine() -> None:
    """DeepSpeed itself works out a batch, of which it has two ideas; logits stay full unless the option is given."""
    run = RunFacts(PrecisionPolicy.parse("no", device_type="cpu"), 2, tensor_parallel_size=2, batch_sizes=(3,))
    config, origins = settle({"tensor_parallel": {"autotp_size": 2}}, run)
    assert "train_batch_size" not in config
    assert config["tensor_parallel"] == {"autotp_size": 2, "vocab_parallel_lm_head": False}
    assert origins["tensor_parallel.vocab_parallel_lm_head"] == "logits stay full"
    asked = {"autotp_size": 2, "vocab_parallel_lm_head": True}
    assert settle({"tensor_parallel": asked}, run)[0]["tensor_parallel"] == asked
    with pytest.raises(ConfigError, match="shard parameters over groups that know nothing of each other"):
        settle({"tensor_parallel": asked, "zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2}}, run)

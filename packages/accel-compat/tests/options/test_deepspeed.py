"""DeepSpeed's plugin with Accelerate's fields: sources, "auto", selection, translation."""

import importlib.util
import os
from contextlib import suppress

import pytest
from torch import nn
from torch.utils.data import DataLoader

from accel.utils.deepspeed import DummyOptim, DummyScheduler
from accel_compat.facade.deepspeed import complete
from accel_compat.options.deepspeed import CompatDeepSpeedPlugin, PluginSelectionError, translate_deepspeed

AUTO = "auto"
DOCUMENT = {
    "zero_optimization": {"stage": 3, "reduce_bucket_size": AUTO, "offload_param": {"device": "cpu"}},
    "optimizer": {"type": "AdamW", "params": {"lr": AUTO, "weight_decay": AUTO}},
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": AUTO, "warmup_max_lr": AUTO, "warmup_num_steps": AUTO},
    },
    "gradient_accumulation_steps": AUTO,
    "gradient_clipping": AUTO,
    "train_batch_size": AUTO,
    "train_micro_batch_size_per_gpu": AUTO,
}


class Run:
    """What an Accelerator says about itself."""

    gradient_accumulation_steps = 4
    num_processes = 2
    split_batches = False
    device = importlib.import_module("torch").device("cpu")


def test_fields_and_variables_make_the_configuration(monkeypatch):
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_ZERO_STAGE", "3")
    monkeypatch.setenv("ACCELERATE_GRADIENT_CLIPPING", "0.5")
    plugin = CompatDeepSpeedPlugin(offload_optimizer_device="cpu", gradient_accumulation_steps=2)
    assert plugin.deepspeed_config["zero_optimization"]["stage"] == plugin.zero_stage == 3
    assert plugin.deepspeed_config["gradient_clipping"] == 0.5
    assert plugin.get_value("zero_optimization.offload_optimizer.device") == "cpu"
    assert plugin.is_zero3_init_enabled()
    translated = translate_deepspeed(plugin)
    assert (translated.zero_stage, translated.offload_optimizer_device, translated.gradient_clipping) == (3, "cpu", 0.5)


def test_the_translation_leaves_the_environment_alone_and_reads_none_of_it(monkeypatch):
    plugin = CompatDeepSpeedPlugin(hf_ds_config={"zero_optimization": {"stage": 1}})
    for name, value in {"GRADIENT_ACCUMULATION_STEPS": "4", "GRADIENT_CLIPPING": "0.5"}.items():
        monkeypatch.setenv(f"ACCELERATE_{name}", value)
    monkeypatch.setattr(os.environ, "clear", lambda: pytest.fail("other threads read the environment meanwhile"))
    translated = translate_deepspeed(plugin)
    assert (translated.gradient_accumulation_steps, translated.gradient_clipping) == (1, None)


def test_partitioned_building_needs_stage_3():
    with pytest.warns(UserWarning, match="Setting it to False"):
        plugin = CompatDeepSpeedPlugin(zero_stage=2, zero3_init_flag=True, offload_param_device="cpu")
    assert not plugin.zero3_init_flag
    assert translate_deepspeed(plugin).offload_param_device == "none"


def test_every_auto_has_a_value_after_preparation():
    plugin = CompatDeepSpeedPlugin(hf_ds_config=DOCUMENT)
    model = nn.Linear(4, 1)
    model.config = type("Config", (), {"hidden_size": 8})()
    optimizer = DummyOptim(model.parameters(), lr=0.5, weight_decay=0.25)
    scheduler = DummyScheduler(optimizer, warmup_num_steps=3)
    complete(plugin, [model, optimizer, scheduler, DataLoader([1] * 8, batch_size=2)], Run())
    config = plugin.deepspeed_config
    assert (config["train_micro_batch_size_per_gpu"], config["train_batch_size"]) == (2, 16)
    assert (config["gradient_accumulation_steps"], config["gradient_clipping"]) == (4, 1.0)
    assert config["optimizer"]["params"] == {"lr": 0.5, "weight_decay": 0.25}
    assert config["scheduler"]["params"] == {"warmup_min_lr": 0.0, "warmup_max_lr": 0.5, "warmup_num_steps": 3}
    assert config["zero_optimization"]["reduce_bucket_size"] == 64
    assert translate_deepspeed(plugin).gradient_accumulation_steps == 1


def test_what_the_objects_do_not_determine_is_refused():
    plugin = CompatDeepSpeedPlugin(hf_ds_config=DOCUMENT)
    with pytest.raises(ValueError, match="at least one of training or evaluation dataloaders"):
        complete(plugin, [nn.Linear(1, 1)], Run())
    with pytest.raises(ValueError, match=r"Can't find `model\.config` entry"):
        complete(plugin, [nn.Linear(1, 1), DataLoader([1], batch_size=1)], Run())
    with pytest.raises(ValueError, match=r"`optimizer\.params\.lr` not found in kwargs"):
        plugin.deepspeed_config_process(must_match=False, **{"zero_optimization.reduce_bucket_size": 1})


def test_values_that_contradict_are_listed_together():
    plugin = CompatDeepSpeedPlugin(zero_stage=2, gradient_clipping=1.0, gradient_accumulation_steps=2)
    filled = {"train_batch_size": 1, "train_micro_batch_size_per_gpu": 1}
    with pytest.raises(ValueError, match=r"gradient_accumulation_steps=2 vs[\s\S]*gradient_clipping=1\.0 vs"):
        plugin.deepspeed_config_process(gradient_accumulation_steps=3, gradient_clipping=2.0, **filled)


@pytest.mark.parametrize(("asked", "other"), [("fp16", "bf16"), ("bf16", "fp16")])
def test_the_precision_enables_its_section(asked, other):
    plugin = CompatDeepSpeedPlugin(zero_stage=2)
    plugin.set_mixed_precision(asked)
    assert plugin.deepspeed_config[asked] == {"enabled": True}
    assert plugin.deepspeed_config[other] == {"enabled": False}
    with pytest.raises(ValueError, match="--mixed_precision"):
        plugin.set_mixed_precision(other)


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="Transformers looks for DeepSpeed")
def test_models_are_built_in_full_within_the_block_of_a_script():
    seen = pytest.importorskip("transformers.integrations.deepspeed")
    plugin = CompatDeepSpeedPlugin(hf_ds_config=DOCUMENT)
    plugin.select(_from_accelerator_state=True)
    try:
        assert seen.is_deepspeed_zero3_enabled()
        with suppress(KeyError), plugin.zero3_init_context_manager(enable=False):
            assert not seen.is_deepspeed_zero3_enabled()
            raise KeyError
        assert seen.is_deepspeed_zero3_enabled()
        assert plugin.zero3_init_flag
    finally:
        seen.unset_hf_deepspeed_config()


def test_only_the_state_selects_a_plugin():
    plugin = CompatDeepSpeedPlugin(zero_stage=2)
    with pytest.raises(ValueError, match="select_deepspeed_plugin"):
        plugin.select()
    with pytest.raises(PluginSelectionError):
        plugin.selected = True
    plugin.select(_from_accelerator_state=True)
    assert plugin.selected


def test_variables_of_a_launcher_beside_a_configuration_are_refused(monkeypatch):
    monkeypatch.setenv("ACCELERATE_CONFIG_DS_FIELDS", "zero_stage,gradient_clipping")
    with pytest.raises(ValueError, match=r"\['zero_stage', 'gradient_clipping'\]"):
        CompatDeepSpeedPlugin(hf_ds_config=DOCUMENT)

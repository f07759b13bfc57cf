"""Options of Megatron-LM: sources, degrees, refusals."""

import dataclasses
import re
from importlib.util import find_spec

import pytest

from accel_megatron import MegatronLMPlugin
from accel_megatron.config import OPTIONS, UNSERVED
from accel_state.errors import BackendError, ConfigError


def test_a_variable_is_read_where_a_field_is_not_given(monkeypatch):
    monkeypatch.setenv("MEGATRON_LM_TP_DEGREE", "4")
    monkeypatch.setenv("MEGATRON_LM_SEQUENCE_PARALLELISM", "false")
    assert (MegatronLMPlugin().tp_degree, MegatronLMPlugin(tp_degree=2).tp_degree) == (4, 2)
    assert MegatronLMPlugin().sequence_parallelism is False
    monkeypatch.setenv("MEGATRON_LM_PP_DEGREE", "two")
    with pytest.raises(ConfigError, match="MEGATRON_LM_PP_DEGREE"):
        MegatronLMPlugin()


def test_each_flag_of_accel_launch_is_an_option():
    from accel_launch.config import settings

    flags = {name.removeprefix("megatron_lm_") for name in settings() if name.startswith("megatron_lm_")}
    assert flags == set(OPTIONS)


OTHER = {
    **dict.fromkeys(("sequence_parallelism", "recompute_activations", "use_distributed_optimizer"), True),
    **dict.fromkeys(("attention_softmax_in_fp32", "calculate_per_token_loss"), False),
    "use_rotary_position_embeddings": True,
    "recompute_granularity": "selective",
    "recompute_method": "block",
    **dict.fromkeys(("attention_dropout", "hidden_dropout", "gradient_clipping"), 0.5),
}


@pytest.mark.parametrize("name", [name for name, option in OPTIONS.items() if not option.refused])
def test_each_flag_and_variable_of_accel_launch_sets_its_field(name, monkeypatch):
    from accel.setup.plugins_from_config import options_from_settings
    from accel_launch.config import resolve_config

    value = OTHER.get(name, 2)
    given = resolve_config({"use_megatron_lm": True, f"megatron_lm_{name}": value}, {})
    (options,) = options_from_settings(given)
    assert getattr(MegatronLMPlugin.build(options.values), name) == value != OPTIONS[name].default
    monkeypatch.setenv(f"MEGATRON_LM_{name.upper()}", str(value).lower())
    assert getattr(MegatronLMPlugin(), name) == value


@pytest.mark.skipif(find_spec("megatron") is None, reason="megatron-core is not installed")
@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"sequence_parallelism": True, "tp_degree": 2}, "sequence_parallel"),
        ({"tp_degree": 2}, "tensor_model_parallel_size"),
        ({"pp_degree": 2}, "pipeline_model_parallel_size"),
        ({"num_layers_per_virtual_pipeline_stage": 1}, "virtual_pipeline_model_parallel_size"),
        ({"expert_model_parallel_size": 2}, "expert_model_parallel_size"),
        ({"expert_tensor_parallel_size": 2}, "expert_tensor_parallel_size"),
        ({"context_parallel_size": 2}, "context_parallel_size"),
        ({"attention_dropout": 0.5}, "attention_dropout"),
        ({"hidden_dropout": 0.5}, "hidden_dropout"),
        ({"attention_softmax_in_fp32": False}, "attention_softmax_in_fp32"),
        ({"recompute_granularity": "selective"}, "recompute_granularity"),
        ({"recompute_method": "block"}, "recompute_method"),
        ({"recompute_num_layers": 2}, "recompute_num_layers"),
    ],
)
def test_options_of_the_model_reach_megatron_core(options, field):
    import torch
    from loops import make_model

    from accel_megatron.conversion.kinds import architecture_of
    from accel_megatron.training.stage import transformer_config

    architecture = architecture_of(make_model("mixtral").config)
    base = {"recompute_activations": True} | ({"pp_degree": 2} if "virtual" in field else {})
    plain, other = (
        transformer_config(MegatronLMPlugin(**given), architecture, torch.bfloat16) for given in (base, base | options)
    )
    assert getattr(plain, field) != getattr(other, field)


@pytest.mark.parametrize("name", [name for name, option in OPTIONS.items() if option.refused])
def test_what_is_not_served_is_refused_with_its_reason(name):
    default = OPTIONS[name].default
    other = {"False": True, "None": 3, "1": 2, "local": "flash"}[str(default)]
    with pytest.raises(ConfigError, match=name):
        MegatronLMPlugin(**{name: other})
    assert getattr(MegatronLMPlugin(**{name: default}), name) == default


@pytest.mark.parametrize("name", UNSERVED)
def test_what_has_another_place_is_refused_with_that_place(name):
    with pytest.raises(ConfigError, match=f"{name}='other': {re.escape(UNSERVED[name])}"):
        MegatronLMPlugin(**{name: "other"})


_WITHOUT_VARIABLE = """
    pipeline_model_parallel_split_rank num_layers_per_virtual_pipeline_stage is_train_batch_min train_iters
    train_samples weight_decay_incr_style start_weight_decay end_weight_decay lr_decay_style lr_decay_iters
    lr_decay_samples lr_warmup_iters lr_warmup_samples lr_warmup_fraction min_lr consumed_samples
    no_wd_decay_cond scale_lr_cond lr_mult megatron_dataset_flag seq_length encoder_seq_length
    decoder_seq_length tensorboard_dir set_all_logging_options eval_iters eval_interval return_logits
    custom_train_step_class custom_train_step_kwargs custom_model_provider_function
    custom_prepare_model_function custom_megatron_datasets_provider_function custom_get_batch_function
    custom_loss_function other_megatron_args
"""


def test_every_field_of_accelerates_plugin_is_known():
    """The fields of contract.md 4.10 that have no environment variable."""
    fields = set(_WITHOUT_VARIABLE.split())
    assert fields | set(OPTIONS) == {one.name for one in dataclasses.fields(MegatronLMPlugin)} - {"given"}


def own(*args):
    return None


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"custom_loss_function": 3}, "custom_loss_function=3; expected a function"),
        ({"custom_train_step_kwargs": {"alpha": 1}}, "arguments of custom_train_step_class; give that, too"),
        ({"custom_prepare_model_function": own}, "prepares what custom_model_provider_function builds"),
        ({"custom_train_step_class": own, "custom_loss_function": own}, "nearest: a subclass of GPTTrainStep"),
    ],
)
def test_own_functions_that_do_not_fit_together_are_refused(options, words):
    with pytest.raises(ConfigError, match=words):
        MegatronLMPlugin(**options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tp_degree": 0}, "tp_degree=0; expected a whole number of at least 1"),
        ({"gradient_clipping": -1}, "gradient_clipping=-1"),
        ({"recompute_method": "all"}, "'uniform' or 'block'"),
        ({"num_layers_per_virtual_pipeline_stage": 0}, "expected a whole number of at least 1, or None"),
    ],
)
def test_invalid_values_are_refused(options, words):
    with pytest.raises(ConfigError, match=words):
        MegatronLMPlugin(**options)


def facts(world, **degrees):
    from accel_backends.core.config import StrategyFacts
    from accel_state import Device, Topology
    from accel_state.parallelism.config import MESH_AXES, ParallelismConfig

    given = frozenset(name.removesuffix("_size") for name in degrees if name.endswith("_size"))
    topology = Topology.from_env({"RANK": "0", "WORLD_SIZE": str(world), "LOCAL_RANK": "0"})
    return StrategyFacts(topology, Device("cpu"), ParallelismConfig(**degrees), frozenset(MESH_AXES) - given)


def test_degrees_come_from_either_place_and_replicas_are_the_rest():
    by_plugin = MegatronLMPlugin(tp_degree=2, pp_degree=2).resolve(facts(8))
    by_axes = MegatronLMPlugin().resolve(facts(8, tp_size=2, pp_size=2, dp_shard_size=2))
    for found in (by_plugin, by_axes):
        assert (found.config.tp_degree, found.config.pp_degree) == (2, 2)
        assert [found.parallelism.size(axis) for axis in ("tp", "pp")] == [2, 2]
        assert found.parallelism.data_parallel_size == 2


def test_experts_are_divided_among_data_parallel_ranks():
    found = MegatronLMPlugin(expert_model_parallel_size=2).resolve(facts(4))
    assert (found.parallelism.size("ep"), found.parallelism.size("dp_replicate")) == (2, 2)
    assert MegatronLMPlugin().resolve(facts(4, ep_size=4)).config.expert_model_parallel_size == 4
    split = MegatronLMPlugin(tp_degree=2, expert_tensor_parallel_size=2).resolve(facts(4, tp_size=2, ep_size=2))
    assert (split.config.expert_model_parallel_size, split.parallelism.data_parallel_size) == (2, 2)
    with pytest.raises(ConfigError, match=r"expert_tensor_parallel_size=3 with tp_degree=2.*; nearest: 1 or 2"):
        MegatronLMPlugin(tp_degree=2, expert_tensor_parallel_size=3).resolve(facts(4, tp_size=2))
    with pytest.raises(ConfigError, match="nearest: use_distributed_optimizer=False"):
        MegatronLMPlugin(expert_model_parallel_size=2, use_distributed_optimizer=True).resolve(facts(2))


def test_context_parallelism_is_off_by_default_and_divides_no_samples():
    from accel_backends.core.select import check_axes

    assert MegatronLMPlugin().context_parallel_size == 1
    check_axes("megatron", MegatronLMPlugin(), facts(4, cp_size=2).parallelism)
    by_plugin = MegatronLMPlugin(context_parallel_size=2).resolve(facts(4))
    by_axes = MegatronLMPlugin().resolve(facts(4, cp_size=2))
    for found in (by_plugin, by_axes):
        assert found.config.context_parallel_size == found.parallelism.size("cp") == 2
        assert found.parallelism.data_parallel_size == 2


@pytest.mark.parametrize(
    ("options", "handler", "words"),
    [
        ({}, {"cp_comm_strategy": "alltoall"}, "cp_comm_strategy='alltoall'.*; nearest: 'allgather'"),
        ({}, {"load_balance": False}, "load_balance=False.*; nearest: True"),
        ({"attention_softmax_in_fp32": False}, {}, "attention_softmax_in_fp32=False with context_parallel_size=2"),
        ({"custom_model_provider_function": own}, {}, "custom_model_provider_function with context_parallel_size=2"),
    ],
)
def test_what_context_parallelism_does_not_compute_is_refused(options, handler, words):
    from accel_state.parallelism.axis_options import TorchContextParallelConfig

    given = facts(2, cp_size=2, cp_handler=TorchContextParallelConfig(**handler))
    with pytest.raises(ConfigError, match=words):
        MegatronLMPlugin(**options).resolve(given)


def test_experts_drop_no_choice():
    from accel_state.parallelism.axis_options import ExpertParallelConfig

    given = facts(2, ep_size=2, ep_handler=ExpertParallelConfig(capacity_factor=1.25))
    with pytest.raises(ConfigError, match=r"capacity_factor=1\.25: .*nearest: None"):
        MegatronLMPlugin().resolve(given)


@pytest.mark.parametrize(
    ("stages", "parts", "words"),
    [
        (1, 4, "pp_degree=1: an interleaved schedule needs three stages"),
        (2, 4, "pp_degree=2: an interleaved schedule needs three stages"),
        (4, 6, "groups of pp_degree=4 micro-batches, and num_micro_batches is 6; nearest: 4"),
    ],
)
def test_interleaved_schedules_that_are_wrong_or_do_not_run_are_refused(stages, parts, words):
    given = MegatronLMPlugin(num_layers_per_virtual_pipeline_stage=2, num_micro_batches=parts)
    with pytest.raises(ConfigError, match=words):
        given.resolve(facts(4, pp_size=stages))


def test_chunks_are_the_layers_of_a_stage_in_equal_parts():
    given = MegatronLMPlugin(pp_degree=4, num_layers_per_virtual_pipeline_stage=2, num_micro_batches=8)
    assert given.resolve(facts(4, pp_size=4)).config.pp_degree == 4
    assert (given.chunks(16), given.chunks(8), MegatronLMPlugin(pp_degree=4).chunks(16)) == (2, None, None)


def test_degrees_that_contradict_each_other_are_refused():
    with pytest.raises(ConfigError, match="tp_degree is 4, and parallelism_config says tp_size=2"):
        MegatronLMPlugin(tp_degree=4).resolve(facts(8, tp_size=2))
    with pytest.raises(ConfigError, match="sequence_parallelism splits sequences over tensor-parallel ranks"):
        MegatronLMPlugin(sequence_parallelism=True).resolve(facts(2))


def test_without_the_library_the_install_line_is_told(monkeypatch):
    from accel_megatron import library

    monkeypatch.setattr(library, "installed", lambda: False)
    with pytest.raises(BackendError, match=r"from a checkout of accel, pip install .*accel-megatron\[megatron\]"):
        library.require_library()

"""Accelerate's own files, of every generation: each key, its meaning and its line; and the published schema."""

import json
from pathlib import Path

import pytest

from accel_launch.config import AccelConfig, resolve_config, settings
from accel_launch.config.accelerate_files import DISTRIBUTED_TYPES, SECTIONS, known_names
from accel_launch.config.resolve import keys_of
from accel_launch.config.schema import schema
from accel_launch.launch.checks import check_settings
from accel_state.errors import ConfigError

BASE = "compute_environment: LOCAL_MACHINE\nmachine_rank: 0\nmain_process_ip: null\nmain_training_function: main\n"
GENERATIONS: dict[str, tuple[str, dict[str, object]]] = {
    # 0.3: fp16 as a switch, no sections
    "0.3": (
        BASE + "distributed_type: MULTI_GPU\nfp16: true\nmain_process_port: null\nnum_machines: 1\nnum_processes: 2\n",
        {"multi_gpu": True, "mixed_precision": "fp16", "num_processes": 2, "main_process_port": None},
    ),
    # 0.5: short keys in sections, strategies by number
    "0.5": (
        BASE
        + "distributed_type: FSDP\nmixed_precision: fp16\nuse_cpu: false\nnum_processes: 4\ndeepspeed_config: {}\n"
        + "fsdp_config:\n  min_num_params: 2000\n  offload_params: true\n  sharding_strategy: 2\n",
        {
            "use_fsdp": True,
            "fsdp_min_num_params": 2000,
            "fsdp_offload_params": True,
            "fsdp_sharding_strategy": "2",
            "mixed_precision": "fp16",
        },
    ),
    # 0.11: DeepSpeed with its own keys
    "0.11": (
        BASE
        + "distributed_type: DEEPSPEED\nfsdp_config: {}\nnum_processes: 2\nuse_cpu: false\ndeepspeed_config:\n"
        + "  gradient_accumulation_steps: 4\n  gradient_clipping: 1.0\n  offload_optimizer_device: cpu\n"
        + "  offload_param_device: none\n  zero3_init_flag: true\n  zero3_save_16bit_model: false\n  zero_stage: 3\n"
        + "  deepspeed_multinode_launcher: standard\n",
        {
            "use_deepspeed": True,
            "zero_stage": 3,
            "gradient_accumulation_steps": 4,
            "gradient_clipping": 1.0,
            "offload_optimizer_device": "cpu",
            "offload_param_device": "none",
            "zero3_init_flag": True,
            "zero3_save_16bit_model": False,
            "deepspeed_multinode_launcher": "standard",
        },
    ),
    # 0.13: prefixed FSDP keys, TPU keys and dynamo_backend at the top
    "0.13": (
        BASE
        + "distributed_type: FSDP\ndowncast_bf16: 'no'\ndynamo_backend: INDUCTOR\ngpu_ids: 0,1\nnum_processes: 2\n"
        + "command_file: null\ncommands: null\ntpu_name: null\ntpu_zone: null\nmegatron_lm_config: {}\n"
        + "rdzv_backend: static\nsame_network: true\nfsdp_config:\n  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n"
        + "  fsdp_backward_prefetch_policy: BACKWARD_PRE\n  fsdp_offload_params: false\n  fsdp_sharding_strategy: 1\n"
        + "  fsdp_state_dict_type: FULL_STATE_DICT\n  fsdp_transformer_layer_cls_to_wrap: BertLayer,T5Block\n",
        {
            "use_fsdp": True,
            "dynamo_backend": "inductor",
            "gpu_ids": "0,1",
            "fsdp_backward_prefetch": "BACKWARD_PRE",
            "fsdp_transformer_layer_cls_to_wrap": "BertLayer,T5Block",
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "tpu_name": None,
        },
    ),
    # 0.28: mpirun and the sections of torch.compile and TPU pods
    "0.28": (
        BASE
        + "distributed_type: MULTI_CPU\ndebug: true\nipex_config:\n  ipex: false\nmpirun_config:\n  mpirun_ccl: '1'\n"
        + "  mpirun_hostfile: /hosts\ndynamo_config:\n  dynamo_backend: EAGER\n  dynamo_mode: default\n"
        + "  dynamo_use_dynamic: true\n  dynamo_use_fullgraph: false\nnum_machines: 1\nnum_processes: 16\n"
        + "tpu_env: []\ntpu_use_cluster: false\ntpu_use_sudo: false\nuse_cpu: true\n",
        {
            "cpu": True,
            "debug": True,
            "mpirun_hostfile": "/hosts",
            "dynamo_backend": "eager",
            "dynamo_use_dynamic": True,
            "num_processes": 16,
            "env": None,
        },
    ),
    # 0.34: fp8 in two spellings of its list
    "0.34": (
        BASE
        + "distributed_type: MULTI_GPU\nenable_cpu_affinity: true\nmixed_precision: fp8\nnum_processes: 2\n"
        + "fp8_config:\n  amax_compute_algo: max\n  amax_history_length: 512\n  backend: TE\n"
        + "  fp8_format: E4M3\n  interval: 2\n  margin: 1\n"
        + "  override_linear_precision: (true, false, true)\n  use_autocast_during_eval: false\n",
        {
            "fp8_backend": "te",
            "fp8_format": "E4M3",
            "fp8_amax_compute_algo": "max",
            "fp8_amax_history_len": 512,
            "fp8_interval": 2,
            "fp8_margin": 1,
            "fp8_override_linear_precision": "true,false,true",
            "enable_cpu_affinity": True,
        },
    ),
    # 1.3: a section for tensor parallelism alone
    "1.3": (
        BASE + "distributed_type: TP\nnum_processes: 4\ntp_config:\n  tp_size: 4\n",
        {"parallelism_config_tp_size": 4},
    ),
    # 1.10: FSDP2 with degrees
    "1.10": (
        BASE
        + "distributed_type: FSDP\nmixed_precision: bf16\nnum_processes: 8\nfsdp_config:\n  fsdp_version: 2\n"
        + "  fsdp_activation_checkpointing: true\n  fsdp_cpu_ram_efficient_loading: false\n"
        + "  fsdp_reshard_after_forward: true\n  fsdp_ignored_modules: .*lora.*\nparallelism_config:\n"
        + "  parallelism_config_cp_size: 4\n  parallelism_config_dp_shard_size: 2\n"
        + "  parallelism_config_cp_comm_strategy: alltoall\n",
        {
            "fsdp_version": 2,
            "fsdp_reshard_after_forward": "true",
            "fsdp_activation_checkpointing": True,
            "fsdp_ignored_modules": ".*lora.*",
            "parallelism_config_cp_size": 4,
            "parallelism_config_dp_shard_size": 2,
            "parallelism_config_cp_comm_strategy": "alltoall",
        },
    ),
    # Megatron-LM
    "megatron": (
        BASE + "distributed_type: MEGATRON_LM\nnum_processes: 8\nmegatron_lm_config:\n  megatron_lm_tp_degree: 2\n"
        "  megatron_lm_recompute_activations: false\n  megatron_lm_sequence_parallelism: true\n",
        {"use_megatron_lm": True, "megatron_lm_tp_degree": 2, "megatron_lm_sequence_parallelism": True},
    ),
}


def load(folder: Path, text: str, name: str = "theirs.yaml") -> AccelConfig:
    path = folder / name
    path.write_text(text)
    return resolve_config({}, {}, path)


@pytest.mark.parametrize("generation", GENERATIONS)
def test_files_of_every_generation_are_read(generation: str, tmp_path: Path) -> None:
    text, expected = GENERATIONS[generation]
    config = load(tmp_path, text)
    assert {name: getattr(config, name) for name in expected} == expected
    assert config.machine_rank == 0


@pytest.mark.parametrize("generation", [name for name in GENERATIONS if name not in ("megatron", "0.11")])
def test_and_can_be_launched_as_far_as_settings_go(generation: str, tmp_path: Path) -> None:
    check_settings(load(tmp_path, GENERATIONS[generation][0]))


@pytest.mark.parametrize("generation", GENERATIONS)
def test_as_json_they_mean_the_same(generation: str, tmp_path: Path) -> None:
    import yaml

    text, _ = GENERATIONS[generation]
    values = yaml.load(text, yaml.BaseLoader)  # texts, as they stand
    cleaned = {key: None if value == "null" else value for key, value in values.items()}
    assert load(tmp_path, json.dumps(cleaned, indent=2), "theirs.json") == load(tmp_path, text)


IN_SECTIONS = [(section, key) for section in SECTIONS for key in keys_of(section)]


# The keys of Accelerate's files, its questionnaire's own spellings among them.
KEYS = {
    "": "compute_environment distributed_type mixed_precision fp16 use_cpu debug num_processes machine_rank "
    "num_machines gpu_ids main_process_ip main_process_port rdzv_backend same_network main_training_function "
    "enable_cpu_affinity downcast_bf16 tpu_name tpu_zone tpu_use_cluster tpu_use_sudo command_file commands tpu_vm "
    "tpu_env dynamo_backend",
    "deepspeed_config": "deepspeed_config_file zero_stage offload_optimizer_device offload_param_device "
    "offload_optimizer_nvme_path offload_param_nvme_path gradient_accumulation_steps gradient_clipping "
    "zero3_save_16bit_model zero3_init_flag deepspeed_moe_layer_cls_names deepspeed_multinode_launcher "
    "deepspeed_hostfile deepspeed_exclusion_filter deepspeed_inclusion_filter",
    "fsdp_config": "fsdp_version fsdp_sharding_strategy fsdp_reshard_after_forward fsdp_offload_params "
    "fsdp_auto_wrap_policy fsdp_transformer_layer_cls_to_wrap fsdp_min_num_params fsdp_backward_prefetch "
    "fsdp_backward_prefetch_policy fsdp_state_dict_type fsdp_forward_prefetch fsdp_use_orig_params "
    "fsdp_cpu_ram_efficient_loading fsdp_sync_module_states fsdp_activation_checkpointing "
    "fsdp_activation_checkpointing_offload fsdp_ignored_modules sharding_strategy offload_params min_num_params",
    "fp8_config": "backend use_autocast_during_eval margin interval fp8_format amax_history_len amax_history_length "
    "amax_compute_algo amax_compute_algorithm override_linear_precision use_mxfp8_block_scaling opt_level "
    "optimization_level pad_inner_dim enable_fsdp_float8_all_gather",
    "dynamo_config": "dynamo_backend dynamo_mode dynamo_use_fullgraph dynamo_use_dynamic "
    "dynamo_use_regional_compilation",
    "parallelism_config": "parallelism_config_dp_replicate_size parallelism_config_dp_shard_size "
    "parallelism_config_tp_size parallelism_config_cp_size parallelism_config_sp_size parallelism_config_cp_backend "
    "parallelism_config_cp_comm_strategy parallelism_config_sp_backend parallelism_config_sp_seq_length "
    "parallelism_config_sp_seq_length_is_variable parallelism_config_sp_attn_implementation",
    "mpirun_config": "mpirun_hostfile mpirun_ccl",
    "tp_config": "tp_size",
    "ipex_config": "ipex use_xpu",
}


@pytest.mark.parametrize("section", KEYS)
def test_every_key_that_accelerate_has_written_is_known(section: str) -> None:
    special = {name.rpartition(".")[2] for name in known_names() if name.rpartition(".")[0] == section}
    assert [key for key in KEYS[section].split() if key not in {*keys_of(section), *special}] == []


def example(name: str) -> str:
    row = settings()[name]
    if name == "fp8_override_linear_precision":
        return "true,false,false"
    if row.facts.choices:
        return next((c for c in row.facts.choices if c != row.default), row.facts.choices[0])
    if row.type is bool:
        return str(not row.default).lower()
    return {int: "2", float: "0.5", str: "abc"}[row.type]


@pytest.mark.parametrize(("section", "key"), IN_SECTIONS)
def test_every_key_of_every_section_gives_its_setting_with_its_line(section: str, key: str, tmp_path: Path) -> None:
    name = keys_of(section)[key]
    config = load(tmp_path, f"# theirs\n{section}:\n  {key}: {example(name)}\n")
    assert getattr(config, name) == settings()[name].parse(example(name), "here")
    assert config.origin(name).detail.endswith("theirs.yaml:3")


@pytest.mark.parametrize("name", [row.name for row in settings().values() if row.facts.section])
def test_every_setting_of_a_section_may_also_stand_at_the_top(name: str, tmp_path: Path) -> None:
    config = load(tmp_path, f"{name}: {example(name)}\n")
    assert config.origin(name).source == "file"


@pytest.mark.parametrize(("kind", "switch"), DISTRIBUTED_TYPES.items())
def test_every_distributed_type_turns_on_what_it_names(kind: str, switch: str | None, tmp_path: Path) -> None:
    config = load(tmp_path, f"distributed_type: {kind}\n")
    on = {name for name in ("cpu", "multi_gpu", "tpu", "use_fsdp", "use_deepspeed", "use_megatron_lm")}
    assert {name for name in on if getattr(config, name)} == ({switch} if switch else set())


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "fsdp_config:\n  fsdp_ofload_params: true\n",
            (":2", "'fsdp_ofload_params' in fsdp_config", "fsdp_offload_params"),
        ),
        ("fsdp_config:\n  x: 1\n", (":2", "unknown key 'x' in fsdp_config", "known: fsdp_version")),
        ("fsdp_confg: {}\n", (":1", "did you mean fsdp_config?")),
        ("distributed_type: MULTI_CPUS\n", (":1", "did you mean MULTI_CPU?")),
        ("cpu: true\ncompute_environment: AMAZON_SAGEMAKER\n", (":2", "only LOCAL_MACHINE")),
        ("deepspeed_config:\n  zero_stage: 4\n", (":2", "zero_stage", "0 to 3")),
        ("deepspeed_config:\n  zero_stage: 2\n  zero_stage: 3\n", (":3", "given twice", "line 2")),
        ("zero_stage: 2\ndeepspeed_config:\n  zero_stage: 3\n", (":3", "given twice", "line 1")),
        ("ipex_config:\n  ipex: true\n", (":2", "ipex_config.ipex", "has ended")),
        ("fp8_config:\n  opt_level: O2\n", (":2", "MS-AMP is not supported", "backend: AO")),
        ("mpirun_config:\n  mpirun_ccl: '4'\n", (":2", "CCL_WORKER_COUNT")),
        ("fp8_config:\n  backend: MSAMP\n", (":2", "fp8_backend", "ao, te")),
        ("fsdp_config: [1]\n", (":1", "fsdp_config is [1]; expected its keys")),
        ("deepspeed_config: ds.json\n", (":1", "deepspeed_config is 'ds.json'; expected its keys")),
    ],
)
def test_a_mistake_is_named_with_its_line_and_what_comes_nearest(
    text: str, words: tuple[str, ...], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text)
    for word in words:
        assert word in str(caught.value), str(caught.value)


@pytest.mark.parametrize("name", known_names())
def test_special_keys_are_taken_where_they_change_nothing(name: str, tmp_path: Path) -> None:
    section, _, key = name.rpartition(".")
    value = {"compute_environment": "LOCAL_MACHINE", "distributed_type": "NO", "tp_config.tp_size": "1"}.get(name, "no")
    text = f"{section}:\n  {key}: {value}\n" if section else f"{key}: {value}\n"
    config = load(tmp_path, text)
    assert config == AccelConfig()


SCHEMA = Path(__file__).parents[2] / "accel-config.schema.json"


def test_the_published_schema_is_that_of_the_table() -> None:
    written = json.dumps(schema(), indent=1) + "\n"
    assert SCHEMA.read_text() == written, "run: accel config schema > this file"


@pytest.mark.parametrize("generation", GENERATIONS)
@pytest.mark.sampled(3)
def test_the_schema_takes_what_the_reader_takes(generation: str) -> None:
    import yaml

    jsonschema = pytest.importorskip("jsonschema")
    validator = jsonschema.validators.validator_for(schema())(schema())
    assert list(validator.iter_errors(yaml.safe_load(GENERATIONS[generation][0]))) == []


@pytest.mark.parametrize(
    "data", [{"sede": 1}, {"mixed_precision": []}, {"num_processes": 0}, {"fsdp_config": {"x": 1}}, {"cpu": "maybe"}]
)
def test_the_schema_refuses_what_the_reader_refuses(data: dict[str, object], tmp_path: Path) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(data, schema())
    with pytest.raises(ConfigError):
        load(tmp_path, json.dumps(data), "x.json")

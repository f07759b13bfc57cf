"""What every option of ``accel launch`` means reaches the script: its Accelerator, its plugins, its environment."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from accel.setup.build import cores_of
from accel.setup.plugins_from_config import compilation_of, degrees_of, fp8_recipe, options_from_settings
from accel_launch.config import AccelConfig, resolve_config, settings
from accel_launch.config.setting import Setting
from accel_launch.launch import HostFacts, plan
from accel_launch.launch.checks import check_settings
from accel_state.errors import ConfigError, LaunchError

CPU = HostFacts(python="/py", num_cores=8, accelerator=None, num_accelerators=0)
# What makes each option mean something.
SWITCHES = {
    "fsdp": {"use_fsdp": True},
    "mixed_precision=fp8": {"mixed_precision": "fp8"},
    "dynamo_backend": {"dynamo_backend": "inductor"},
    "parallelism_config_cp_size": {"parallelism_config_cp_size": 2},
    "parallelism_config_sp_size": {"parallelism_config_sp_size": 2},
}


def other_than_default(row: Setting) -> object:
    """A value of a setting that is not its default."""
    special = {"fp8_override_linear_precision": "true,false,false", "fsdp_version": 1, "tee": "3"}
    if row.name in special:
        return special[row.name]
    if row.facts.choices:
        return next((choice for choice in row.facts.choices if choice != row.default), row.facts.choices[0])
    if row.type is bool:
        return not row.default
    return {int: 2, float: 0.5, str: "a"}[row.type]


def with_needs(row: Setting) -> dict[str, object]:
    name, equals, value = row.facts.needs.partition("=")
    if not name:
        return {}
    needed = settings()[name]
    return {**with_needs(needed), name: value if equals else other_than_default(needed)}


EXPORTED = [row.name for row in settings().values() if row.facts.env]


@pytest.mark.parametrize("name", EXPORTED)
def test_what_has_a_variable_that_others_read_is_written_there(name: str) -> None:
    row = settings()[name]
    value = other_than_default(row)
    config = resolve_config(with_needs(row) | {name: value}, {})
    written = config.variables()
    if name == "fp8_override_linear_precision":
        parts = [written[f"ACCELERATE_FP8_OVERRIDE_{part}"] for part in ("FPROP", "DGRAD", "WGRAD")]
        assert ",".join(parts) == "true,false,false"
        return
    assert written[row.facts.env[0]] == row.text(config.__getattribute__(name))
    # and read back by the same name
    assert getattr(resolve_config(with_needs(row), written), name) == getattr(config, name)


@pytest.mark.parametrize("name", EXPORTED)
def test_what_nobody_gave_is_not_written(name: str) -> None:
    assert resolve_config({}, {}).variables() == {}
    row = settings()[name]
    if row.facts.needs:
        config = resolve_config({}, {row.facts.env[0]: row.text(other_than_default(row))})
        assert config.variables() == {}


NEEDY = [row.name for row in settings().values() if row.facts.needs]


@pytest.mark.parametrize("name", NEEDY)
def test_an_option_without_effect_is_refused_at_once(name: str) -> None:
    row = settings()[name]
    config = resolve_config({}, {}, flags={name: row.text(other_than_default(row))})
    if getattr(config, name) == row.default:
        return  # only one value exists, and it changes nothing
    with pytest.raises(LaunchError, match=f"{name} .*means nothing without"):
        check_settings(config)


def test_sections_of_a_file_that_names_another_strategy_may_stay(tmp_path: Path) -> None:
    path = tmp_path / "theirs.yaml"
    path.write_text("distributed_type: 'NO'\nfsdp_config:\n  fsdp_offload_params: true\n")
    check_settings(resolve_config({}, {}, path))
    path.write_text("fsdp_config:\n  fsdp_offload_params: true\n")
    with pytest.raises(LaunchError, match=r"theirs\.yaml:2\) means nothing without --use_fsdp"):
        check_settings(resolve_config({}, {}, path))


@pytest.mark.parametrize(
    ("settings_", "words"),
    [
        ({"use_fsdp": True, "use_deepspeed": True}, "use_fsdp and use_deepspeed are both set"),
        ({"cpu": True, "tpu": True}, "cpu and tpu are both set"),
        ({"slurm": True, "hostfile": "h"}, "slurm and hostfile are both set"),
        ({"use_fsdp": True, "backend": "ddp"}, "use_fsdp and backend=ddp contradict"),
        ({"backend": "foo"}, "backend is 'foo' .*is not installed; there are: auto, .*ddp"),
        ({"nnodes": "4:2"}, "the first number is how few"),
        ({"nnodes": "2", "num_machines": 3}, "drop num_machines"),
        ({"rdzv_conf": "last_call_timeout=3"}, "add --rdzv_backend c10d"),
        ({"nnodes": "1:4"}, "4 machines need main_process_ip"),
        ({"use_parallelism_config": True}, "give one of parallelism_config_dp_replicate_size, "),
        ({"mixed_precision": "fp8", "fp8_margin": 2}, "fp8_margin .*means nothing without fp8_backend=te"),
    ],
)
def test_contradictions_are_named(settings_: dict[str, object], words: str) -> None:
    with pytest.raises((LaunchError, ConfigError), match=words):
        check_settings(resolve_config(settings_, {}))


@pytest.mark.parametrize("switch", ["use_megatron_lm"])
def test_a_strategy_that_is_not_installed_is_refused_with_those_that_are(switch: str) -> None:
    from importlib.metadata import entry_points

    name = {"use_megatron_lm": "megatron"}[switch]
    if name in {entry.name for entry in entry_points(group="accel.backends")}:
        pytest.skip(f"{name} is installed here")
    with pytest.raises(LaunchError, match=f"no backend '{name}' is installed; there are: .*ddp"):
        check_settings(resolve_config({switch: True}, {}))


def test_a_stronger_source_turns_off_what_it_excludes(tmp_path: Path) -> None:
    path = tmp_path / "theirs.yaml"
    path.write_text("distributed_type: MULTI_GPU\n")
    config = resolve_config({}, {}, path, flags={"cpu": True})
    assert (config.cpu, config.multi_gpu) == (True, False)
    assert str(config.origin("multi_gpu")) == "flag --cpu, which excludes it"
    check_settings(config)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, []),
        ({"use_fsdp": True}, [("fsdp", {})]),
        ({"use_megatron_lm": True, "megatron_lm_tp_degree": 2}, [("megatron", {"tp_degree": 2})]),
        (
            {"use_fsdp": True, "fsdp_offload_params": True, "fsdp_transformer_layer_cls_to_wrap": "A,B"},
            [("fsdp", {"cpu_offload": True, "transformer_cls_names_to_wrap": "A,B"})],
        ),
        (
            {"use_fsdp": True, "fsdp_version": 1, "fsdp_min_num_params": 5},
            [("fsdp", {"fsdp_version": 1, "min_num_params": 5})],
        ),
    ],
)
def test_options_of_a_switch_have_the_names_of_the_plugins_fields(given: dict[str, object], expected: object) -> None:
    assert [(one.backend, one.values) for one in options_from_settings(resolve_config(given, {}))] == expected


@pytest.mark.parametrize("name", [name for name in settings() if name.startswith("fsdp_")])
def test_every_fsdp_option_is_taken_by_the_plugin(name: str) -> None:
    from accel_backends import FSDPConfig

    row = settings()[name]
    value = {"fsdp_use_orig_params": True, "fsdp_state_dict_type": "SHARDED_STATE_DICT"}.get(
        name, other_than_default(row)
    )
    more: dict[str, object] = {}
    if name == "fsdp_activation_checkpointing_offload":
        more = {"fsdp_activation_checkpointing": True}
    if name == "fsdp_sharding_strategy":
        value = "HYBRID_SHARD"
    (options,) = options_from_settings(resolve_config({"use_fsdp": True, **more, name: value}, {}))
    assert FSDPConfig.build(options.values, sources=options.sources).backend in ("fsdp", "fsdp1")


def test_degrees_and_options_of_axes_make_a_parallelism_config() -> None:
    given = {"dp_shard_size": 2, "cp_size": 2, "cp_comm_strategy": "alltoall"}
    degrees = degrees_of(resolve_config({f"parallelism_config_{name}": value for name, value in given.items()}, {}))
    assert degrees is not None
    assert (degrees.dp_shard_size, degrees.cp_size, degrees.tp_size) == (2, 2, 1)
    assert degrees.cp_handler is not None
    assert degrees.cp_handler.cp_comm_strategy == "alltoall"
    sequence = {
        "sp_size": 2,
        "sp_seq_length": 128,
        "sp_seq_length_is_variable": False,
        "sp_attn_implementation": "sdpa",
    }
    ulysses = degrees_of(resolve_config({f"parallelism_config_{name}": value for name, value in sequence.items()}, {}))
    assert ulysses is not None
    assert ulysses.sp_handler is not None
    assert (ulysses.sp_handler.sp_seq_length, ulysses.sp_handler.sp_seq_length_is_variable) == (128, False)
    assert degrees_of(resolve_config({}, {})) is None


@pytest.mark.parametrize(("switch", "shards"), [(None, 2), (True, 2), (False, None)])
def test_degrees_can_be_turned_off_where_a_file_gives_them(switch: bool | None, shards: int | None) -> None:
    degrees = degrees_of(resolve_config({"parallelism_config_dp_shard_size": 2, "use_parallelism_config": switch}, {}))
    assert (None if degrees is None else degrees.dp_shard_size) == shards


def test_compilation_and_fp8_recipes_follow_the_settings() -> None:
    flags = {"dynamo_backend": "INDUCTOR", "dynamo_mode": "max-autotune", "dynamo_use_dynamic": True}
    plugin = compilation_of(resolve_config({}, {}, flags=flags))
    assert plugin is not None
    assert (plugin.backend, plugin.mode, plugin.dynamic) == ("inductor", "max-autotune", True)
    assert compilation_of(AccelConfig()) is None
    recipe = fp8_recipe(
        resolve_config({"mixed_precision": "fp8", "fp8_backend": "ao", "fp8_pad_inner_dim": False}, {}), {}
    )
    assert recipe is not None
    assert recipe.pad_inner_dim is False  # type: ignore[union-attr]
    unnamed = fp8_recipe(resolve_config({"mixed_precision": "fp8", "fp8_pad_inner_dim": False}, {}), {})
    assert unnamed == recipe
    assert fp8_recipe(AccelConfig(), {"ACCELERATE_FP8_BACKEND": "AO"}) is None


@pytest.mark.parametrize(
    ("cores", "count", "shares"),
    [(range(8), 2, [[0, 1, 2, 3], [4, 5, 6, 7]]), (range(5), 2, [[0, 1], [2, 3, 4]]), ([3], 2, [[3], [3]])],
)
def test_cores_are_shared_out(cores: range, count: int, shares: list[list[int]]) -> None:
    assert [cores_of(list(cores), rank, count) for rank in range(count)] == shares


def test_valued_options_take_their_value_and_switches_none() -> None:
    flags = {"use_fsdp": True, "fsdp_offload_params": "false", "fsdp_sync_module_states": "True"}
    config = resolve_config({}, {}, flags=flags)
    assert (config.fsdp_offload_params, config.fsdp_sync_module_states) == (False, True)


SHOW = """
import json, os
from accel import Accelerator
accelerator = Accelerator()
backend = accelerator.backend
config = getattr(backend, "config", None)
print(json.dumps({
    "rank": accelerator.process_index,
    "backend": backend.name,
    "precision": accelerator.mixed_precision,
    "steps": accelerator.gradient_accumulation_steps,
    "compile": accelerator.dynamo_plugin.backend if accelerator.dynamo_plugin else None,
    "shards": accelerator.parallelism_config.dp_shard_size,
    "offload": getattr(config, "cpu_offload", None),
    "checkpointing": getattr(config, "activation_checkpointing", None),
    "wrap": getattr(config, "transformer_cls_names_to_wrap", None),
    "role": os.environ.get("ROLE_NAME"),
    "cores": len(os.sched_getaffinity(0)),
    "variables": {k: v for k, v in os.environ.items() if k.startswith(("FSDP_", "ACCELERATE_"))},
}))
accelerator.end_training()
"""


def launch(
    folder: Path, *argv: str, script: str = SHOW, env: Mapping[str, str] | None = None
) -> list[dict[str, object]]:
    (folder / "script.py").write_text(script)
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("ACCEL", "OMP_", "FSDP_"))}
    done = subprocess.run(
        [sys.executable, "-m", "accel", "launch", *argv, "script.py"],
        cwd=folder,
        env=clean | dict(env or {}),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return sorted(rows, key=lambda row: int(row["rank"]))


def test_options_reach_the_accelerator_and_libraries_that_read_variables(tmp_path: Path) -> None:
    argv = ["--cpu", "--num_processes", "2", "--use_fsdp", "--fsdp_offload_params", "true", "--role", "trainer"]
    argv += ["--fsdp_activation_checkpointing", "true", "--fsdp_transformer_layer_cls_to_wrap", "Block,Other"]
    argv += ["--mixed_precision", "bf16", "--gradient_accumulation_steps", "3", "--dynamo_backend", "eager"]
    argv += ["--enable_cpu_affinity"]
    rows = launch(tmp_path, *argv)
    assert len(rows) == 2
    for row in rows:
        assert (row["backend"], row["precision"], row["steps"], row["compile"]) == ("fsdp", "bf16", 3, "eager")
        assert (row["shards"], row["offload"], row["checkpointing"], row["wrap"]) == (2, True, True, ["Block", "Other"])
        assert row["role"] == "trainer"
        assert row["cores"] == max(1, len(os.sched_getaffinity(0)) // 2)
        assert row["variables"] == {
            "ACCELERATE_CPU_AFFINITY": "true",
            "ACCELERATE_DYNAMO_BACKEND": "eager",
            "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "3",
            "ACCELERATE_MIXED_PRECISION": "bf16",
            "ACCELERATE_USE_CPU": "true",
            "ACCELERATE_USE_FSDP": "true",
            "FSDP_ACTIVATION_CHECKPOINTING": "true",
            "FSDP_OFFLOAD_PARAMS": "true",
            "FSDP_TRANSFORMER_CLS_TO_WRAP": "Block,Other",
        }


@pytest.mark.slow
def test_a_file_of_accelerate_reaches_the_accelerator_without_any_launcher(tmp_path: Path) -> None:
    (tmp_path / "theirs.yaml").write_text(
        "distributed_type: FSDP\nmixed_precision: bf16\nfsdp_config:\n  fsdp_version: 2\n  fsdp_offload_params: true\n"
    )
    (row,) = launch(tmp_path, "--cpu", "--config_file", "theirs.yaml")
    assert (row["backend"], row["precision"], row["offload"]) == ("fsdp", "bf16", True)
    done = subprocess.run(
        [sys.executable, "script.py"],
        cwd=tmp_path,
        env=dict(os.environ) | {"ACCEL_CONFIG_FILE": "theirs.yaml", "ACCEL_CPU": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert json.loads(done.stdout)["offload"] is True, done.stderr


def test_the_variables_of_an_outer_launcher_do_not_reach_an_inner_one(tmp_path: Path) -> None:
    outer = plan(resolve_config({}, {}, flags={"mixed_precision": "bf16"}), ["a.py"], CPU, env={}).processes[0].env
    (row,) = launch(tmp_path, "--cpu", env=outer)
    assert row["precision"] == "no"


def test_tee_chooses_streams_and_role_names_them(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import sys; print('out'); print('err', file=sys.stderr)")
    argv = ["--cpu", "--num_processes", "2", "--tee", "0:3,1:1", "--role", "worker", "--log_dir", "logs"]
    done = subprocess.run(
        [sys.executable, "-m", "accel", "launch", *argv, "script.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert sorted(done.stdout.splitlines()) == ["[worker 0] out", "[worker 1] out"]
    assert sorted(done.stderr.splitlines()) == ["[worker 0] err", "err"]
    assert (tmp_path / "logs" / "attempt_0" / "rank_1.log").read_text() == "out\n"


def test_prefixes_are_coloured_where_colours_are_wanted(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("print('out')")
    argv = [sys.executable, "-m", "accel", "launch", "--cpu", "--prefix_output", "script.py"]
    for env, mark in (({"FORCE_COLOR": "1"}, "\033[36m[rank 0]\033[0m out"), ({"NO_COLOR": "1"}, "[rank 0] out")):
        plain = {k: v for k, v in os.environ.items() if k not in ("FORCE_COLOR", "NO_COLOR", "TERM")}
        done = subprocess.run(argv, cwd=tmp_path, env=plain | env, capture_output=True, text=True, timeout=60)
        assert done.stdout == f"{mark}\n"


def test_quiet_leaves_the_first_traceback_only(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("raise ValueError('the cause')")
    argv = ["--cpu", "--num_processes", "2", "--max_restarts", "1", "-q", "script.py"]
    done = subprocess.run(
        [sys.executable, "-m", "accel", "launch", *argv], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    assert "accel launch" not in done.stderr
    assert done.stderr.startswith("Traceback")
    assert done.stderr.rstrip().endswith("ValueError: the cause")

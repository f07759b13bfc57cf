"""What the ``accel`` command promises: fast, no torch before it is needed, errors that say what would work."""

import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path

import pytest
from click.core import ParameterSource

from accel_launch.cli.app import COMMANDS, ListedCommand, command_line, run
from accel_launch.cli.printing import outlined
from accel_launch.config import resolve_config, settings


def accel(
    *argv: str, cwd: Path | None = None, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "accel", *argv],
        cwd=cwd,
        env=dict(os.environ) | {"COLUMNS": "100"} | dict(env or {}),
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.fixture
def parsed() -> Callable[[list[str]], tuple[dict[str, object], tuple[str, ...]]]:
    """What ``accel launch`` makes of its arguments: the options that were given, and the program."""

    def parse(argv: list[str]) -> tuple[dict[str, object], tuple[str, ...]]:
        root = command_line()
        with root.make_context("accel", ["launch", *argv]) as above:
            _, launch, rest = root.resolve_command(above, ["launch", *argv])
            assert launch is not None
            with launch.make_context("launch", rest, parent=above) as context:
                given = ParameterSource.COMMANDLINE
                values = {k: v for k, v in context.params.items() if context.get_parameter_source(k) is given}
        return values, values.pop("program", ())

    return parse


@pytest.mark.parametrize(
    ("argv", "values", "rest"),
    [
        (["--num_processes", "2", "a.py", "--cpu"], {"num_processes": "2"}, ("a.py", "--cpu")),
        (["--num-processes=2", "a.py"], {"num_processes": "2"}, ("a.py",)),
        (["--cpu", "--no-cpu", "a.py"], {"cpu": False}, ("a.py",)),
        (["-m", "pkg.mod", "-m"], {"module": True}, ("pkg.mod", "-m")),
        (["--cpu", "--", "-odd.py", "--cpu"], {"cpu": True}, ("-odd.py", "--cpu")),
        (["a.py", "--", "--cpu"], {}, ("a.py", "--", "--cpu")),
        (["a.py", "--unknown", "--num_processes"], {}, ("a.py", "--unknown", "--num_processes")),
        (["--num_processes", "-1", "a.py"], {"num_processes": "-1"}, ("a.py",)),
        ([], {}, ()),
    ],
)
def test_options_end_where_the_program_begins(
    argv: list[str],
    values: dict[str, object],
    rest: tuple[str, ...],
    parsed: Callable[[list[str]], tuple[dict[str, object], tuple[str, ...]]],
) -> None:
    assert parsed(argv) == (values, rest)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--num-proceses", "2", "a.py"], "unknown option --num-proceses; did you mean --num_processes?"),
        (["--strategy", "fsdp", "a.py"], "unknown option --strategy; did you mean --backend?"),
        (["--num-proceses=2", "a.py"], "unknown option --num-proceses; did you mean --num_processes?"),
        (["--xyzzy", "a.py"], "unknown option --xyzzy; --help"),
        (["-x", "a.py"], "unknown option -x"),
        (["--num_processes"], "'--num_processes' requires an argument"),
        (["--cpu=yes", "a.py"], "'--cpu' does not take a value"),
        (["--no-no-python", "a.py"], "unknown option --no-no-python; did you mean --no_python?"),
    ],
)
def test_a_wrong_option_is_answered_with_what_would_work(
    argv: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["launch", *argv]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("name", list(settings()))
def test_every_setting_is_an_option_of_launch(
    name: str, parsed: Callable[[list[str]], tuple[dict[str, object], tuple[str, ...]]]
) -> None:
    row = settings()[name]
    value = [] if row.is_switch else [row.facts.choices[0] if row.facts.choices else "1"]
    flags, _ = parsed([f"--{name.replace('_', '-')}", *value])
    config = resolve_config({}, {}, flags={name: flags[name]})
    assert config.origin(name).source == "flag"


# What users of Accelerate type, without SageMaker's credentials and the level of MS-AMP.
FLAGS = """
config_file quiet module no_python debug cpu multi_gpu tpu mixed_precision num_processes num_machines
num_cpu_threads_per_process enable_cpu_affinity dynamo_backend dynamo_mode dynamo_use_fullgraph dynamo_use_dynamic
dynamo_use_regional_compilation use_deepspeed use_fsdp use_parallelism_config use_megatron_lm gpu_ids same_network
machine_rank main_process_ip main_process_port tee log_dir role rdzv_backend rdzv_conf max_restarts monitor_interval
tpu_cluster no_tpu_cluster tpu_use_sudo vm env main_training_function downcast_bf16 mpirun_hostfile
deepspeed_config_file zero_stage offload_optimizer_device offload_param_device offload_optimizer_nvme_path
offload_param_nvme_path gradient_accumulation_steps gradient_clipping zero3_init_flag zero3_save_16bit_model
deepspeed_hostfile deepspeed_exclusion_filter deepspeed_inclusion_filter deepspeed_multinode_launcher
deepspeed_moe_layer_cls_names fsdp_version fsdp_offload_params fsdp_min_num_params fsdp_sharding_strategy
fsdp_reshard_after_forward fsdp_auto_wrap_policy fsdp_transformer_layer_cls_to_wrap fsdp_backward_prefetch
fsdp_state_dict_type fsdp_forward_prefetch fsdp_use_orig_params fsdp_cpu_ram_efficient_loading
fsdp_sync_module_states fsdp_activation_checkpointing fsdp_activation_checkpointing_offload megatron_lm_tp_degree
megatron_lm_use_custom_fsdp megatron_lm_no_load_optim megatron_lm_eod_mask_loss
megatron_lm_overlap_cpu_optimizer_d2h_h2d megatron_lm_no_save_optim megatron_lm_optimizer_cpu_offload
megatron_lm_use_precision_aware_optimizer megatron_lm_decoder_last_pipeline_num_layers megatron_lm_pp_degree
megatron_lm_num_micro_batches megatron_lm_sequence_parallelism megatron_lm_recompute_activations
megatron_lm_use_distributed_optimizer megatron_lm_gradient_clipping megatron_lm_recompute_granularity
megatron_lm_recompute_method megatron_lm_recompute_num_layers megatron_lm_attention_backend
megatron_lm_expert_model_parallel_size megatron_lm_context_parallel_size megatron_lm_attention_dropout
megatron_lm_hidden_dropout megatron_lm_attention_softmax_in_fp32 megatron_lm_expert_tensor_parallel_size
megatron_lm_calculate_per_token_loss megatron_lm_use_rotary_position_embeddings fp8_backend
fp8_use_autocast_during_eval fp8_margin fp8_interval fp8_format fp8_amax_history_len fp8_amax_compute_algo
fp8_override_linear_precision fp8_enable_fsdp_float8_all_gather fp8_pad_inner_dim
parallelism_config_dp_replicate_size parallelism_config_dp_shard_size parallelism_config_tp_size
parallelism_config_cp_size parallelism_config_cp_backend parallelism_config_cp_comm_strategy
parallelism_config_sp_size parallelism_config_sp_backend parallelism_config_sp_seq_length
parallelism_config_sp_seq_length_is_variable parallelism_config_sp_attn_implementation
"""


def test_every_flag_that_users_of_accelerate_know_is_one() -> None:
    root = command_line()
    with root.make_context("accel", ["launch"]) as above:
        _, launch, _ = root.resolve_command(above, ["launch"])
    assert launch is not None
    known = {spelling for option in launch.params for spelling in (*option.opts, *option.secondary_opts)}
    assert [flag for flag in FLAGS.split() if f"--{flag}" not in known] == []
    assert {"-q", "-m", "-t"} <= known


@pytest.mark.parametrize("name", list(COMMANDS))
def test_every_listed_command_can_be_loaded_and_bears_its_name(name: str) -> None:
    listed = command_line().commands[name]
    assert isinstance(listed, ListedCommand)
    assert listed.load().name == name


@pytest.mark.parametrize("argv", [["--help"], ["launch", "--help"], ["config", "--help"], ["config", "show"]])
def test_help_and_settings_come_without_torch(argv: list[str]) -> None:
    code = (
        "import sys\n"
        "from accel_launch.cli.app import run\n"
        f"status = run({argv!r})\n"
        "heavy = {'torch', 'numpy', 'yaml', 'typer', 'pydantic'} & set(sys.modules)\n"
        "sys.exit(status or (f'imported: {heavy}' if heavy else 0))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_help_names_every_setting_once_and_hides_the_second_spelling() -> None:
    shown = accel("launch", "--help", env={"COLUMNS": "160"}).stdout
    counts = Counter(re.findall(r"--(\w+)", shown))
    assert {name: counts[name] for name in settings()} == dict.fromkeys(settings(), 1)
    assert "--num-processes" not in shown


@pytest.mark.parametrize(
    ("argv", "status", "words"),
    [
        ([], 2, "launch"),
        (["--version"], 0, "accel 0."),
        (["config"], 2, "validate"),
        (["lanch"], 2, "did you mean launch?"),
        (["config", "shwo"], 2, "did you mean config show?"),
        (["--verison"], 2, "did you mean --version?"),
    ],
)
def test_the_bare_command_answers(argv: list[str], status: int, words: str) -> None:
    done = accel(*argv)
    assert done.returncode == status
    assert words in done.stdout + done.stderr


def test_config_show_tells_where_each_value_came_from(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("mixed_precision: bf16\nseed: 1\n")
    done = accel(
        *["config", "show", "--json", "--config-file", "mine.yaml", "--num-processes", "3"],
        cwd=tmp_path,
        env={"ACCEL_SEED": "2", "ACCELERATE_USE_CPU": "1"},
    )
    rows = {row["name"]: row for row in json.loads(done.stdout)}
    assert rows["num_processes"] == {
        "name": "num_processes",
        "value": 3,
        "source": "flag",
        "detail": "--num_processes",
    }
    assert (rows["seed"]["value"], rows["seed"]["detail"]) == (2, "ACCEL_SEED")
    assert (rows["cpu"]["value"], rows["cpu"]["detail"]) == (True, "ACCELERATE_USE_CPU")
    assert (rows["mixed_precision"]["source"], rows["mixed_precision"]["detail"]) == ("file", "mine.yaml:1")
    assert rows["debug"]["source"] == "default"


def test_config_show_prints_a_table_and_notes_misspelt_variables() -> None:
    done = accel("config", "show", env={"ACCEL_SED": "2"})
    assert done.returncode == 0
    assert "mixed_precision" in done.stdout
    assert "ACCEL_SED is set and is no setting; did you mean ACCEL_SEED?" in done.stderr


def test_config_default_writes_a_file_that_changes_nothing_and_is_never_overwritten(tmp_path: Path) -> None:
    assert accel("config", "default", cwd=tmp_path).returncode == 0
    written = (tmp_path / "accel.yaml").read_text()
    assert resolve_config({}, {}, tmp_path / "accel.yaml") == resolve_config({}, {})
    again = accel("config", "default", cwd=tmp_path)
    assert again.returncode == 2
    assert "exists" in again.stderr
    assert (tmp_path / "accel.yaml").read_text() == written


def test_config_default_with_its_comment_signs_removed_is_the_defaults(tmp_path: Path) -> None:
    from accel_launch.cli.config import default_text

    lines = [line.removeprefix("# ") for line in default_text().splitlines()]
    kept = [line for line in lines if line.partition(":")[0] in settings()]
    (tmp_path / "all.yaml").write_text("\n".join(kept))
    assert len(kept) == len(settings())
    assert resolve_config({}, {}, tmp_path / "all.yaml") == resolve_config({}, {})


@pytest.mark.parametrize(
    ("content", "status", "words"),
    [
        ("cpu: true\nseed: 3\n", 0, "2 settings, all valid"),
        ("sede: 3\n", 2, "mine.yaml:1: unknown key 'sede'; did you mean seed?"),
        ("num_machines: 2\nmachine_rank: 2\n", 2, "machine_rank is 2 of num_machines 2; expected 0 to 1"),
    ],
)
def test_config_validate_names_the_line(content: str, status: int, words: str, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(content)
    done = accel("config", "validate", "mine.yaml", cwd=tmp_path)
    assert done.returncode == status
    assert words in done.stdout + done.stderr


def test_config_validate_names_every_mistake(tmp_path: Path) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text("seed: x\nmixed_precision: bf16\nfsdp_config:\n  fsdp_offload_parms: true\n")
    done = accel("config", "validate", str(path))
    assert done.returncode == 2
    assert "2 mistakes" in done.stderr
    for words in (f"seed is 'x' (file {path}:1)", f"{path}:4: unknown key 'fsdp_offload_parms' in fsdp_config"):
        assert words in done.stderr


def test_config_show_can_leave_out_defaults() -> None:
    done = accel("config", "show", "--given", "--seed", "3")
    assert [line.split() for line in done.stdout.splitlines()[1:]] == [["seed", "3", "flag", "--seed"]]


def test_env_reports_versions_devices_and_changed_settings() -> None:
    done = accel("env", "--json", env={"ACCEL_SEED": "5"})
    found = json.loads(done.stdout)
    assert found["packages"]["accel-training"]
    assert found["accelerate"].endswith(
        f"; under accel launch --compat: accel-compat {found['packages']['accel-compat']}"
    )
    assert found["devices"]
    assert found["variables"]["ACCEL_SEED"] == "5"
    assert [row["name"] for row in found["settings"]] == ["seed"]


PLUGIN = """
import click, os
open(os.environ["LOADED"], "w").close()

@click.command()
@click.option("--some_flag", is_flag=True)
def greet(some_flag):
    print("hello", some_flag)
    return 7

nothing = 3
"""


@pytest.fixture
def plugin(tmp_path: Path) -> dict[str, str]:
    """Variables under which a package is installed that adds commands, some of them broken."""
    (tmp_path / "greeting.py").write_text(PLUGIN)
    facts = tmp_path / "greeting-1.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: greeting\nVersion: 1\n")
    (facts / "entry_points.txt").write_text(
        "[accel.commands]\ngreet = greeting:greet\nnothing = greeting:nothing\ngone = gone_module:x\n"
        "launch = greeting:greet\n"
    )
    return {"PYTHONPATH": str(tmp_path), "LOADED": str(tmp_path / "loaded")}


def test_commands_of_other_packages_are_listed_without_importing_them(plugin: Mapping[str, str]) -> None:
    done = accel("--help", env=plugin)
    assert "greet" in done.stdout
    assert "From greeting." in done.stdout
    assert done.stdout.count(" launch ") == 1
    assert not Path(plugin["LOADED"]).exists()


@pytest.mark.parametrize(
    ("argv", "status", "words"),
    [
        (["greet", "--some-flag"], 7, "hello True"),
        (["greet", "--som_flag"], 2, "unknown option --som_flag; did you mean --some_flag?"),
        (["gret"], 2, "did you mean greet?"),
        (["nothing"], 2, "accel nothing is greeting:nothing, a int; expected a click.Command"),
        (["gone"], 2, "accel gone cannot be loaded from gone_module:x: No module named 'gone_module'"),
    ],
)
def test_a_command_of_another_package_runs_as_ours_do(
    argv: list[str], status: int, words: str, plugin: Mapping[str, str]
) -> None:
    done = accel(*argv, env=plugin)
    assert done.returncode == status, done.stderr
    assert words in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("command", "package", "folders"),
    [
        ("check", "accel-testing", "./packages/* ./testing"),
        ("plan", "accel", "./packages/*"),
        ("migrate", "accel-compat", "./packages/*"),
    ],
)
def test_a_command_of_another_package_says_how_to_install_that(
    command: str, package: str, folders: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the packages that it builds on, of which a checkout of accel-launch alone has few installed."""
    monkeypatch.setattr("importlib.metadata.entry_points", lambda **_: ())
    assert run([command, "train.py"]) == 2
    said = f"comes with {package}, which is not installed here; from a checkout: pip install {folders}\n"
    assert capsys.readouterr().err.endswith(said)


def test_lists_in_nested_facts_are_shown_without_brackets() -> None:
    facts = {"origins": {"cpu": ["flag", "--cpu"]}, "none": []}
    assert outlined("config", facts) == ["config:", "  origins:", "    cpu: flag, --cpu", "  none: none"]


def test_a_backend_without_its_library_is_listed_as_such() -> None:
    missing = {
        f"{backend} ({library} is not installed)"
        for backend, module, library in (("xla", "torch_xla", "torch_xla"), ("megatron", "megatron", "megatron-core"))
        if find_spec(module) is None
    }
    listed = next(line for line in accel("env").stdout.splitlines() if line.startswith("backends: "))
    assert missing == set(re.findall(r"(?:xla|megatron) \([\w-]+ is not installed\)", listed))

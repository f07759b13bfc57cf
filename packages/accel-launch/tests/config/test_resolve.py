"""What resolve_config promises: one precedence, an origin for every value, messages that say what would work."""

import dataclasses
import itertools
import json
import pickle
from datetime import timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accel_launch.config import PRECEDENCE, AccelConfig, Origin, resolve_config, settings, unknown_variables
from accel_precision import PrecisionPolicy
from accel_precision.policy import ALIASES
from accel_state.errors import ConfigError

NAMES = list(settings())
SAMPLES = {
    bool: (True, False, True),
    int: (3, 4, 5),
    float: (0.5, 0.25, 2.0),
    str: ("a", "b", "c"),
    timedelta: (timedelta(seconds=7), timedelta(seconds=8), timedelta(minutes=2)),
}


# Values of settings whose range or only choice leaves nothing of the above.
RARE: dict[str, tuple[object, ...]] = {
    "fp8_override_linear_precision": ("true,false,false", "false,false,true", "true,true,true"),
    "fsdp_version": (1, 2, 1),
    "zero_stage": (1, 2, 3),
    "megatron_lm_attention_dropout": (0.5, 0.25, 0.125),
    "megatron_lm_hidden_dropout": (0.5, 0.25, 0.125),
}


def samples(name: str) -> tuple[object, ...]:
    row = settings()[name]
    if name in RARE:
        return RARE[name]
    return (row.facts.choices * 3)[:3] if row.facts.choices else SAMPLES[row.type]


def text(name: str, value: object) -> str:
    return settings()[name].text(value)


def given_by(source: str, name: str, value: object, folder: Path) -> dict[str, object]:
    """Arguments of resolve_config in which only ``source`` gives ``name``."""
    if source == "call":
        return {"call": {name: value}}
    if source == "flag":
        return {"flags": {name: text(name, value)}}
    if source == "env":
        return {"env": {f"ACCEL_{name.upper()}": text(name, value)}}
    path = folder / "settings.yaml"
    path.write_text(f"{name}: {text(name, value)}\n")
    return {"file": path}


def resolve(*parts: dict[str, object]) -> AccelConfig:
    merged: dict[str, object] = {"call": {}, "env": {}}
    for part in parts:
        merged |= part
    return resolve_config(**merged)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("strong", "weak"), [*itertools.pairwise(PRECEDENCE[:4]), ("call", "file")])
def test_the_stronger_source_wins_for_every_setting(name: str, strong: str, weak: str, tmp_path: Path) -> None:
    first, second, *_ = samples(name)
    config = resolve(given_by(weak, name, second, tmp_path), given_by(strong, name, first, tmp_path))
    assert getattr(config, name) == first
    assert config.origin(name).source == strong


@pytest.mark.parametrize("name", NAMES)
def test_every_setting_has_its_default_where_nobody_gives_it(name: str) -> None:
    config = resolve_config({}, {})
    assert getattr(config, name) == getattr(AccelConfig(), name)
    assert config.origin(name) == Origin("default")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("source", PRECEDENCE[:4])
def test_the_document_of_a_launcher_keeps_value_and_origin(name: str, source: str, tmp_path: Path) -> None:
    launcher = resolve(given_by(source, name, samples(name)[0], tmp_path))
    child = resolve_config({}, {"ACCEL_CONFIG": launcher.to_document()})
    assert child == launcher
    assert child.origin(name) == launcher.origin(name)


def test_a_flag_of_the_launcher_beats_a_variable_of_the_child() -> None:
    document = resolve_config({}, {}, flags={"mixed_precision": "bf16"}).to_document()
    config = resolve_config({}, {"ACCEL_CONFIG": document, "ACCEL_MIXED_PRECISION": "fp16"})
    assert config.mixed_precision == "bf16"


def test_a_call_beats_a_flag_of_the_launcher() -> None:
    document = resolve_config({}, {}, flags={"gradient_accumulation_steps": "4"}).to_document()
    config = resolve_config({"gradient_accumulation_steps": 2}, {"ACCEL_CONFIG": document})
    assert config.gradient_accumulation_steps == 2


def test_none_in_a_call_means_not_given() -> None:
    assert resolve_config({"mixed_precision": None}, {"ACCEL_MIXED_PRECISION": "bf16"}).mixed_precision == "bf16"


def test_an_empty_variable_means_not_given() -> None:
    assert resolve_config({}, {"ACCEL_NUM_PROCESSES": ""}).num_processes is None


@pytest.mark.parametrize(
    ("variable", "value", "name", "expected"),
    [
        ("ACCELERATE_MIXED_PRECISION", "BF16", "mixed_precision", "bf16"),
        ("ACCELERATE_USE_CPU", "yes", "cpu", True),
        ("ACCELERATE_DEBUG_MODE", "1", "debug", True),
        ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "8", "gradient_accumulation_steps", 8),
        ("ACCELERATE_TORCH_DEVICE", "cuda:1", "device", "cuda:1"),
        ("ACCELERATE_LOG_LEVEL", "INFO", "log_level", "info"),
    ],
)
def test_variables_that_users_of_accelerate_have_set_are_read(
    variable: str, value: str, name: str, expected: object
) -> None:
    config = resolve_config({}, {variable: value})
    assert getattr(config, name) == expected
    assert config.origin(name) == Origin("env", variable)


def test_our_own_variable_wins_over_the_foreign_one() -> None:
    env = {"ACCELERATE_MIXED_PRECISION": "fp16", "ACCEL_MIXED_PRECISION": "bf16"}
    assert resolve_config({}, env).mixed_precision == "bf16"


@pytest.mark.parametrize(
    ("given_text", "seconds"), [("90", 90), ("90s", 90), ("10m", 600), ("1h30m", 5400), ("1.5s", 1.5), ("0.5h", 1800)]
)
def test_durations_are_read_as_people_write_them(given_text: str, seconds: float) -> None:
    assert resolve_config({}, {"ACCEL_TIMEOUT": given_text}).timeout == timedelta(seconds=seconds)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("num_processes", "0", ("'0'", "at least 1", "nearest that works: 1")),
        ("num_processes", "two", ("'two'", "a whole number")),
        ("main_process_port", "70000", ("'70000'", "0 to 65535", "nearest that works: 65535")),
        ("mixed_precision", "bf61", ("'bf61'", "one of no, fp16, bf16, fp8", "nearest that works: bf16")),
        ("cpu", "perhaps", ("'perhaps'", "true or false")),
        ("timeout", "soon", ("'soon'", "1h30m")),
        ("timeout", "-3", ("'-3'", "duration")),
        ("monitor_interval", "nan?", ("a number",)),
    ],
)
def test_a_wrong_value_is_named_with_what_would_work(name: str, value: str, words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_config({}, {f"ACCEL_{name.upper()}": value})
    for word in (name, f"ACCEL_{name.upper()}", *words):
        assert word in str(caught.value)


@pytest.mark.parametrize("name", [*PrecisionPolicy.Named, *ALIASES, "compute=bf16,reduce=fp32", "bf16,output=none"])
def test_every_precision_that_accel_precision_reads_is_taken(name: str) -> None:
    assert resolve_config({}, {"ACCEL_MIXED_PRECISION": name}).mixed_precision == name


@pytest.mark.parametrize(
    ("name", "value"), [("num_processes", True), ("seed", 1.5), ("project_dir", 3), ("cpu", 2), ("debug", [])]
)
def test_a_call_with_the_wrong_type_is_refused(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=name):
        resolve_config({name: value}, {})


def test_an_unknown_argument_is_answered_with_the_nearest_setting() -> None:
    with pytest.raises(ConfigError, match=r"'mixed_precison'.*did you mean mixed_precision"):
        resolve_config({"mixed_precison": "bf16"}, {})


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("cpu: true\nnum_proceses: 2\n", (":2", "'num_proceses'", "did you mean num_processes")),
        ("cpu: true\n\nseed: many\n", (":3", "seed", "'many'", "whole number")),
        ("seed: 1\nseed: 2\n", (":2", "given twice", "line 1")),
        ("cpu: true\nuse_cpu: true\n", (":2", "cpu is given twice", "line 1")),
        ("seed: [1\n", ("not valid YAML",)),
        ("- seed\n", (":1", "name: value", "a list")),
        ("hello", (":1", "name: value", "a single value")),
        ("seed: !!python/object/apply:os.system ['true']\n", (":1", "could not determine a constructor")),
    ],
)
def test_a_mistake_in_a_file_is_named_with_its_line(content: str, words: tuple[str, ...], tmp_path: Path) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text(content)
    with pytest.raises(ConfigError) as caught:
        resolve_config({}, {}, path)
    assert str(path) in str(caught.value)
    for word in words:
        assert word in str(caught.value)


def test_a_missing_file_is_an_error_and_not_ignored(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.yaml"):
        resolve_config({}, {}, tmp_path / "absent.yaml")


def test_json_files_know_their_lines_too(tmp_path: Path) -> None:
    path = tmp_path / "settings.json"
    path.write_text(json.dumps({"mixed-precision": "bf16", "seed": 7}, indent=2))
    config = resolve_config({}, {}, path)
    assert (config.mixed_precision, config.seed) == ("bf16", 7)
    assert config.origin("seed") == Origin("file", f"{path}:3")


def test_a_variable_may_name_the_file(tmp_path: Path) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text("seed: 7\n")
    assert resolve_config({}, {"ACCEL_CONFIG_FILE": str(path)}).seed == 7


@pytest.mark.parametrize("document", ["{", "[]", '{"values": {"seed": 1}}', '{"values": {"seed": 1}, "origins": {}}'])
def test_a_document_that_no_launcher_wrote_is_refused(document: str) -> None:
    with pytest.raises(ConfigError, match="ACCEL_CONFIG"):
        resolve_config({}, {"ACCEL_CONFIG": document})


def test_a_document_of_a_newer_launcher_may_hold_settings_unknown_here() -> None:
    document = json.dumps(
        {"values": {"new": 1, "seed": 2}, "origins": {"new": ["flag", "--new"], "seed": ["flag", "--seed"]}}
    )
    assert resolve_config({}, {"ACCEL_CONFIG": document}).seed == 2


def test_misspelt_variables_are_reported_and_foreign_ones_left_alone() -> None:
    env = {"ACCEL_MIXED_PRECISON": "bf16", "ACCEL_XYZZY_PLUGH": "1", "ACCEL_CONFIG": "", "OTHER_SEED": "1"}
    assert unknown_variables(env) == {"ACCEL_MIXED_PRECISON": "ACCEL_MIXED_PRECISION"}


def test_a_configuration_is_a_value() -> None:
    config = resolve_config({"seed": 3}, {})
    assert pickle.loads(pickle.dumps(config)) == config
    assert hash(config) == hash(resolve_config({"seed": 3}, {}))
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.seed = 4  # type: ignore[misc]


def test_explain_lists_every_setting_in_the_order_of_the_table() -> None:
    assert [row.name for row in resolve_config({}, {}).explain()] == NAMES


@given(st.sampled_from(NAMES), st.integers(0, 2))
def test_dump_and_parse_are_inverse(name: str, index: int) -> None:
    row = settings()[name]
    value = samples(name)[index % len(samples(name))]
    assert row.parse(json.loads(json.dumps(row.dump(value))), "here") == value

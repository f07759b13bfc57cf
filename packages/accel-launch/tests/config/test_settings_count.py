"""Every setting changes something: its value is read by the code that acts on it, or becomes an option of a plugin."""

import ast
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import accel
import accel_launch
from accel.setup.plugins_from_config import compilation_of, degrees_of, fp8_recipe, options_from_settings
from accel_launch.config import AccelConfig, resolve_config, settings
from accel_launch.config.setting import Setting

PACKAGES = [Path(package.__file__).parent for package in (accel, accel_launch)]
# What a setting becomes where no code reads it by name, by the first words of its name.
BECOMES: dict[str, Callable[[AccelConfig], object]] = {
    "dynamo_": compilation_of,
    "fp8_": lambda config: fp8_recipe(config, {}),
    "fsdp_": lambda config: [_plugin(one.values, "FSDPConfig") for one in options_from_settings(config)],
    "parallelism_config_": degrees_of,
    # A backend that others install takes options, or reads variables.
    "megatron_lm_": lambda config: [*options_from_settings(config), config.variables()],
}
OTHERS: Mapping[str, object] = {
    "fp8_override_linear_precision": "true,false,false",
    "fsdp_version": 1,
    "fsdp_sharding_strategy": "HYBRID_SHARD",
    "parallelism_config_sp_attn_implementation": "sdpa",
}
# What must be given too, for the value to be one that works.
BESIDE: Mapping[str, Mapping[str, object]] = {
    "fsdp_backward_prefetch": {"fsdp_version": 1},
    "fsdp_activation_checkpointing_offload": {"fsdp_activation_checkpointing": True},
    "parallelism_config_sp_seq_length_is_variable": {"parallelism_config_sp_seq_length": 128},
}


def _plugin(options: Mapping[str, Any], name: str) -> object:
    import accel_backends

    return _plain(getattr(accel_backends, name).build(options))


def other_than_default(row: Setting) -> object:
    """A value of a setting that is not its default."""
    if row.name in OTHERS:
        return OTHERS[row.name]
    if row.facts.choices:
        return next(choice for choice in row.facts.choices if choice != row.default)
    return not row.default if row.type is bool else {int: 2, float: 0.5, str: "a"}[row.type]


def needed(row: Setting) -> dict[str, object]:
    """What must be on for a setting to mean anything."""
    name, equals, value = row.facts.needs.partition("=")
    if not name:
        return {}
    return {**needed(settings()[name]), name: value if equals else other_than_default(settings()[name])}


@cache
def read_by_name() -> frozenset[str]:
    """Every attribute that code outside of ``accel_launch.config`` reads of something called ``config``."""
    files = [
        path
        for package in PACKAGES
        for path in package.rglob("*.py")
        if "config" not in path.relative_to(package).parts[:-1]
    ]
    return frozenset(name for path in files for name in _attributes(ast.parse(path.read_text(encoding="utf-8"))))


def _attributes(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value).rpartition(".")[2] == "config":
            yield node.attr


def can_differ(row: Setting) -> bool:
    """Whether more than one value can be given at all."""
    return row.facts.choices != (row.default,) or bool(row.facts.pattern)


ROWS = [row for row in settings().values() if can_differ(row)]
OF_DEEPSPEED = [row.name for row in ROWS if row.facts.needs == "use_deepspeed" and not row.facts.launch_only]
SWITCHES = [row.name for row in ROWS if row.facts.strategy]
BY_NAME = [
    row.name for row in ROWS if not row.name.startswith(tuple(BECOMES)) and row.name not in (*OF_DEEPSPEED, *SWITCHES)
]
BY_EFFECT = [row.name for row in ROWS if row.name.startswith(tuple(BECOMES))]


@pytest.mark.parametrize("name", BY_NAME)
def test_every_setting_is_read_by_the_code_that_acts_on_it(name: str) -> None:
    assert name in read_by_name(), f"{name} is taken and changes nothing"


@pytest.mark.parametrize("name", BY_EFFECT)
def test_every_option_of_a_plugin_changes_the_plugin(name: str) -> None:
    row = settings()[name]
    made_of = next(make for prefix, make in BECOMES.items() if name.startswith(prefix))
    given = needed(row) | dict(BESIDE.get(name, {}))
    before, after = (made_of(resolve_config(given | more, {})) for more in ({}, {name: other_than_default(row)}))
    assert _plain(before) != _plain(after), f"{name} is taken and changes nothing"


def _plain(made: Any) -> object:
    """What can be compared: two functions of one meaning are not equal."""
    if not dataclasses.is_dataclass(made):
        return made
    return {field.name: repr(getattr(made, field.name)) for field in dataclasses.fields(made)}


def test_every_option_of_deepspeed_becomes_one_of_its_plugin() -> None:
    given = {name: other_than_default(settings()[name]) for name in OF_DEEPSPEED}
    (options,) = options_from_settings(resolve_config({"use_deepspeed": True, **given}, {}))
    assert set(options.sources) == set(options.values)
    assert len(options.values) == len(given)


@pytest.mark.parametrize("name", SWITCHES)
def test_every_switch_of_a_strategy_requests_its_backend(name: str) -> None:
    (options,) = options_from_settings(resolve_config({name: True}, {}))
    assert (options.backend, options.origin) == (settings()[name].facts.strategy, f"{name} (call)")


def test_the_settings_that_take_one_value_only_are_known() -> None:
    """They name what there is a choice of elsewhere; a second value must come with a reader."""
    only = {name for name, row in settings().items() if not can_differ(row)}
    assert only == {"main_training_function"}

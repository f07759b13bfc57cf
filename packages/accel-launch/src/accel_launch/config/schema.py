"""JSON schema of configuration files, derived from the settings table."""

from datetime import timedelta

from accel_launch.config import accelerate_files
from accel_launch.config.model import settings
from accel_launch.config.setting import Setting

_WORDS = ["true", "false", "yes", "no", "on", "off", "1", "0"]
_TEXTS = {"type": ["string", "number", "boolean", "null"]}


def schema() -> dict[str, object]:
    """JSON schema of a configuration file: our settings, and the sections and keys of Accelerate's files.

    Editors complete and check files with it (yaml-language-server: ``# yaml-language-server: $schema=PATH``). It is no
    stricter than ``accel config validate``, which also checks combinations of settings.
    """
    properties: dict[str, object] = {}
    for row in settings().values():
        properties[row.name] = _of(row)
        properties |= dict.fromkeys(row.facts.aliases, _same(row))
    for section in accelerate_files.SECTIONS:
        rows = [row for row in settings().values() if row.facts.section == section]
        keys: dict[str, object] = {key: _same(row) for row in rows for key in row.section_keys}
        special = (name.removeprefix(f"{section}.") for name in accelerate_files.known_names() if section in name)
        keys |= dict.fromkeys(special, _TEXTS)
        properties[section] = {"type": ["object", "null"], "additionalProperties": False, "properties": keys}
    properties |= {
        "compute_environment": {"enum": ["LOCAL_MACHINE"]},
        "distributed_type": {"enum": [*accelerate_files.DISTRIBUTED_TYPES, False]},
        "fp16": _TEXTS,
        "bf16": _TEXTS,
        "ipex_config": {"type": ["object", "null"]},
        "tp_config": {"type": ["object", "null"], "properties": {"tp_size": {"type": "integer", "minimum": 1}}},
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Settings of accel",
        "type": "object",
        "additionalProperties": False,
        "properties": dict(sorted(properties.items())),
        "$defs": {"switch": {"enum": [True, False, *_WORDS, *(word.capitalize() for word in _WORDS[:6]), None]}},
    }


def _same(row: Setting) -> dict[str, object]:
    return {"$ref": f"#/properties/{row.name}"}


def _of(row: Setting) -> dict[str, object]:
    """Schema of one setting: all values that the file reader accepts, including texts in place of numbers."""
    low, high = row.facts.minimum, row.facts.maximum
    limits = {"minimum": low, "maximum": high}
    described: dict[str, object] = {"description": row.facts.help}
    if row.default is not None:
        described["default"] = row.dump(row.default)
    number = {key: value for key, value in limits.items() if value is not None}
    if row.facts.choices and not row.facts.pattern:
        folded = {choice.lower(): choice for choice in row.facts.choices}
        values: list[object] = [*dict.fromkeys([*row.facts.choices, *folded, *map(str.upper, folded)])]
        values += [word == "true" for word in folded if word in ("true", "false")]
        values += [False] if "no" in folded else []  # YAML reads a bare no as False
        return described | {"enum": [*values, None]}
    if row.type is bool:
        return described | {"$ref": "#/$defs/switch"}
    if row.type in (int, float):
        kind = "integer" if row.type is int else "number"
        return described | {
            "anyOf": [{"type": kind, **number}, {"type": "string", "pattern": r"^-?\d"}, {"type": "null"}]
        }
    if row.type is timedelta:
        return described | {"type": ["string", "number", "null"]}
    kinds = ["string", "number", "boolean", "null"]
    return described | {"type": [*kinds, "array"] if row.facts.listed else kinds}

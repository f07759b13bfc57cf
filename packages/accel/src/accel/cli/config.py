"""``accel config show``, ``validate`` and ``default``."""

import json
import os
import sys
from datetime import timedelta
from pathlib import Path

from accel.cli.command import Command
from accel.cli.launch import CONFIG_FILE, JSON, config_from
from accel.cli.option import Option, Parsed, setting_options
from accel.config.model import AccelConfig, settings
from accel.config.resolve import resolve_config, unknown_variables
from accel.config.setting import Setting
from accel_state.errors import ConfigError

_DEFAULT_FILE = "accel.yaml"
_OUTPUT = Option("output", f"Where to write it; {_DEFAULT_FILE} in this folder if not given.", metavar="PATH")


def shown(value: object) -> str:
    """A value as a reader of a terminal or a file writes it."""
    if isinstance(value, timedelta):
        return f"{value.total_seconds():g}s"
    if isinstance(value, bool):
        return str(value).lower()
    return "" if value is None else str(value)


def rows_as_json(config: AccelConfig) -> list[dict[str, object]]:
    """Every setting as plain data: name, value, source and which one of it."""
    return [
        {
            "name": row.name,
            "value": settings()[row.name].dump(row.value),
            "source": row.origin.source,
            "detail": row.origin.detail,
        }
        for row in config.explain()
    ]


def _show(parsed: Parsed) -> int:
    config = config_from(parsed)
    if parsed.on(JSON.name):
        json.dump(rows_as_json(config), sys.stdout, indent=2)
        print()
        return 0
    from rich.console import Console
    from rich.table import Table

    table = Table("setting", "value", "from", box=None, header_style="bold", pad_edge=False)
    for row in config.explain():
        style = "dim" if row.origin.source == "default" else ""
        table.add_row(row.name, shown(row.value), str(row.origin), style=style)
    Console(highlight=False).print(table)
    for stranger, meant in unknown_variables(os.environ).items():
        print(f"note: {stranger} is set and is no setting; did you mean {meant}?", file=sys.stderr)
    return 0


def _validate(parsed: Parsed) -> int:
    from accel.launch.planning import check_settings

    if len(parsed.rest) != 1:
        raise ConfigError(f"validate takes one file, got {len(parsed.rest)}: {' '.join(parsed.rest) or 'none'}")
    # The file alone, so that no flag or variable hides a wrong value in it.
    config = resolve_config({}, {}, parsed.rest[0])
    check_settings(config)
    count = sum(row.origin.source == "file" for row in config.explain())
    print(f"{parsed.rest[0]}: {count} settings, all valid")
    return 0


def _default(parsed: Parsed) -> int:
    path = Path(parsed.text(_OUTPUT.name) or _DEFAULT_FILE)
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(default_text())
    except FileExistsError:
        raise ConfigError(f"{path} exists and is left as it is; name another file with --output") from None
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error
    print(f"wrote {path}; use it with --config_file {path}")
    return 0


def default_text() -> str:
    """A configuration file in which every setting stands, explained and commented out at its default."""
    lines = ["# Settings of accel. What is commented out has the value shown; flags and variables win over this file."]
    group = ""
    for row in settings().values():
        if row.facts.group != group:
            group = row.facts.group
            lines += ["", f"# --- {group} ---"]
        lines += _commented(row)
    return "\n".join(lines) + "\n"


def _commented(row: Setting) -> list[str]:
    return [f"# {row.facts.help} ({row.expected})", f"# {row.name}: {shown(row.default)}".rstrip()]


SHOW = Command(
    name="config show",
    text=(
        "Shows what a launch with the same options would use, and where each value came from.\n"
        "A flag wins over a variable, a variable over the file, the file over the default."
    ),
    options=(*setting_options(launch=True), CONFIG_FILE, JSON),
    run=_show,
)
VALIDATE = Command(
    name="config validate",
    usage="FILE",
    text="Checks every key and value of a YAML or JSON file; a mistake is named with its line.",
    options=(),
    run=_validate,
)
DEFAULT = Command(
    name="config default",
    text="Writes a file that lists every setting with its default. An existing file is never touched.",
    options=(_OUTPUT,),
    run=_default,
)

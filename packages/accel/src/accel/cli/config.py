"""``accel config show``, ``validate`` and ``default``."""

import os
import sys
from datetime import timedelta
from pathlib import Path

import rich_click as click

from accel.cli.options import as_json, config_file, config_from, setting_options
from accel.cli.printing import print_json, print_table
from accel.config.model import AccelConfig, settings
from accel.config.resolve import resolve_config, unknown_variables
from accel.config.setting import Setting
from accel_state.errors import ConfigError

_DEFAULT_FILE = "accel.yaml"


@click.group()
def config() -> None:
    """Show, check and write settings."""


@config.command()
@setting_options
@config_file
@as_json
def show(config_file: str | None, *, as_json: bool, **flags: str | bool | None) -> int:
    """Shows what a launch with the same options would use, and where each value came from.

    A flag wins over a variable, a variable over the file, the file over the default.
    """
    config = config_from(flags, config_file)
    if as_json:
        print_json(rows_as_json(config))
        return 0
    rows = config.explain()
    defaults = [row.origin.source == "default" for row in rows]
    print_table(
        ["setting", "value", "from"], [(row.name, shown(row.value), row.origin) for row in rows], dimmed=defaults
    )
    for stranger, meant in unknown_variables(os.environ).items():
        print(f"note: {stranger} is set and is no setting; did you mean {meant}?", file=sys.stderr)
    return 0


@config.command()
@click.argument("file")
def validate(file: str) -> int:
    """Checks every key and value of a YAML or JSON file; a mistake is named with its line."""
    from accel.launch.checks import check_settings

    # The file alone, so that no flag or variable hides a wrong value in it.
    config = resolve_config({}, {}, file)
    check_settings(config)
    count = sum(row.origin.source == "file" for row in config.explain())
    print(f"{file}: {count} settings, all valid")
    return 0


@config.command()
@click.option("--output", default=_DEFAULT_FILE, metavar="PATH", help=f"Where to write it, if not {_DEFAULT_FILE}.")
def default(output: str) -> int:
    """Writes a file that lists every setting with its default. An existing file is never touched."""
    path = Path(output)
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(default_text())
    except FileExistsError:
        raise ConfigError(f"{path} exists and is left as it is; name another file with --output") from None
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error
    print(f"wrote {path}; use it with --config_file {path}")
    return 0


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

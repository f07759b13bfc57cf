"""Options that several commands share, including those of the settings table."""

import os
from collections.abc import Callable
from typing import Any, TypeVar

import rich_click as click

from accel_launch.config.model import AccelConfig, settings
from accel_launch.config.resolve import resolve_config, without_launcher
from accel_launch.config.setting import Setting, metavar

Fn = TypeVar("Fn", bound=Callable[..., Any])

FOLDER = click.Path(exists=True, file_okay=False)
config_file = click.option("--config_file", metavar="PATH", help="Read settings from this YAML or JSON file.")
as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


def setting_options(fn: Fn) -> Fn:
    """Decorates a command with one option for each setting; options that are not given are None."""
    for row in reversed(list(settings().values())):
        fn = _option(row)(fn)
    return fn


def config_from(flags: dict[str, Any], file: str | None) -> AccelConfig:
    """Resolves the configuration of flags, environment and the named file.

    Ignores the document and the variables that a launcher wrote into the environment: this command may run inside a
    process of another launcher, whose number of processes does not apply here.
    """
    return resolve_config({}, without_launcher(os.environ), file, flags=flags)


def _option(row: Setting) -> Callable[[Fn], Fn]:
    choices = f" One of: {', '.join(row.facts.choices)}." if row.facts.choices else ""
    # --no_no_python would be useless.
    off = f"/--no_{row.name}" if row.is_switch and not row.name.startswith("no_") else ""
    return click.option(
        *filter(None, (row.facts.short, f"--{row.name}{off}")),
        row.name,
        cls=click.RichOption,
        panel=row.facts.group,
        help=row.facts.help + choices,
        metavar=metavar(row) or None,
        is_flag=row.is_switch,
        # Values are parsed together with those of other sources, which may have a higher or lower precedence.
        type=click.BOOL if row.is_switch else click.UNPROCESSED,
        default=None,
        shell_complete=lambda ctx, param, begun: [c for c in row.facts.choices if c.startswith(begun)],
    )

"""Parsers of commands as argparse objects, whose options come from the settings table."""

import argparse
from collections.abc import Iterable
from typing import Any

from accel_launch.config.model import settings
from accel_launch.config.setting import Setting
from accel_state.errors import ConfigError


class CompatArgumentParser(argparse.ArgumentParser):
    """Parser whose options can be written with underscores or hyphens; its help shows the first form.

    ``given`` of a parsed namespace has the names of the options of settings that the command line gives.
    """

    def add_argument(self, *names: Any, **options: Any) -> argparse.Action:
        """Adds an option under its names, and under ones with hyphens for underscores, hidden unless it is required."""
        hyphened = [name.replace("_", "-") for name in names if name.startswith("--") and "_" in name]
        if options.get("required"):
            return super().add_argument(*names, *hyphened, **options)
        action = super().add_argument(*names, **options)
        if hyphened:
            hidden = {"dest": action.dest, "default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
            super().add_argument(*hyphened, **{**options, **hidden})
        return action


class _Given(argparse.Action):
    """Stores a value, and notes that the command line gives it."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: Any = None) -> None:
        setattr(namespace, self.dest, self.const if self.nargs == 0 else values)
        namespace.given = frozenset(getattr(namespace, "given", ())) | {self.dest}


def parser_of(
    name: str, description: str, subparsers: Any = None, func: Any = None, **options: Any
) -> argparse.ArgumentParser:
    """Returns the parser of a command, or of a subcommand; ``func`` is what the subcommand calls with its namespace."""
    if subparsers is None:
        return CompatArgumentParser(
            f"Accelerate {name} command", description=description, allow_abbrev=False, **options
        )
    parser: argparse.ArgumentParser = subparsers.add_parser(name, description=description, **options)
    parser.set_defaults(func=func)
    return parser


def add_settings(parser: argparse.ArgumentParser) -> None:
    """Adds one option for each setting, grouped as in ``accel launch --help``."""
    groups: dict[str, Any] = {}
    for row in settings().values():
        if row.facts.group not in groups:
            groups[row.facts.group] = parser.add_argument_group(row.facts.group)
        group = groups[row.facts.group]
        names = tuple(filter(None, (row.facts.short, f"--{row.name}")))
        text = row.facts.help.replace("%", "%%")
        if not row.is_switch:
            _add(group, names, dest=row.name, type=_reader(row), default=row.default, help=text)
            continue
        _add(group, names, dest=row.name, nargs=0, const=True, default=row.default, help=text)
        if not row.name.startswith("no_"):
            _add(group, (f"--no_{row.name}",), dest=row.name, nargs=0, const=False, help=argparse.SUPPRESS)


def _add(group: Any, names: tuple[str, ...], **options: Any) -> None:
    group.add_argument(*names, action=_Given, **({"default": argparse.SUPPRESS} | options))
    hyphened = [name.replace("_", "-") for name in names if name.startswith("--") and "_" in name]
    if hyphened:
        hidden = {"default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
        group.add_argument(*hyphened, action=_Given, **{**options, **hidden})


def _reader(row: Setting) -> Any:
    def read(text: str) -> Any:
        try:
            return row.parse(text, f"--{row.name}")
        except ConfigError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return read


def given_settings(args: argparse.Namespace) -> dict[str, Any]:
    """Settings that a command line or a caller gave: those parsed, and those that differ from their defaults."""
    given: frozenset[str] = getattr(args, "given", frozenset())
    found = {}
    for row in settings().values():
        value = getattr(args, row.name, row.default)
        if row.name in given or value not in (None, row.default):
            found[row.name] = row.text(value) if isinstance(value, bool) and row.type is not bool else value
    return found


def words_of(args: argparse.Namespace, names: Iterable[str]) -> list[str]:
    """Command line of the named options that have a value: ``--name value``, or ``--name`` if it is true."""
    words: list[str] = []
    for name in names:
        value = getattr(args, name, None)
        if value in (None, False):
            continue
        words.append(f"--{name}")
        if value is not True:
            words += [str(one) for one in (value if isinstance(value, list) else [value])]
    return words

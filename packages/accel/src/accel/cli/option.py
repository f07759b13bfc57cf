"""What may follow a command: its options, read by one small parser.

The parser is ours because a launcher's rules are not those of parsing libraries: both spellings of every flag, nothing
after the program's name looked at, an unknown flag answered with the nearest known one; and because loading a library
for it takes longer than starting the processes does.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import final

from accel.config.model import settings
from accel.config.setting import metavar, nearest
from accel_state.errors import ConfigError


@final
@dataclass(frozen=True, slots=True)
class Option:
    """One option of a command. Without a ``metavar`` it is a switch."""

    name: str
    help: str
    group: str = "Options"
    metavar: str = ""
    short: str | None = None
    negatable: bool = False

    @property
    def flag(self) -> str:
        """The spelling that help shows; hyphens do as well."""
        return f"--{self.name}"


HELP = Option("help", "Show this and end.", short="-h")


@final
@dataclass(frozen=True, slots=True)
class Parsed:
    """What was typed: values by option name (text, or a bool for a switch), and what follows the options."""

    values: Mapping[str, str | bool]
    rest: tuple[str, ...]

    def text(self, name: str) -> str | None:
        """The value of an option that takes one."""
        value = self.values.get(name)
        return value if isinstance(value, str) else None

    def on(self, name: str) -> bool:
        """Whether a switch was given."""
        return self.values.get(name) is True


def setting_options(*, launch: bool) -> tuple[Option, ...]:
    """The options that the table of settings gives; without ``launch`` only those that a script reads."""
    return tuple(
        Option(
            row.name,
            f"{row.facts.help} One of: {', '.join(row.facts.choices)}." if row.facts.choices else row.facts.help,
            row.facts.group,
            metavar(row),
            row.facts.short,
            # --no_no_python would help nobody.
            negatable=row.is_switch and not row.name.startswith("no_"),
        )
        for row in settings().values()
        if launch or not row.facts.launch_only
    )


def parse_options(argv: Sequence[str], options: Iterable[Option]) -> Parsed:
    """Reads options up to the first word that is none; the rest is not looked at.

    Raises:
        ConfigError: for an unknown option, with the nearest known one, or one whose value is missing.
    """
    table = _spellings(options)
    values: dict[str, str | bool] = {}
    position = 0
    while position < len(argv):
        word = argv[position]
        if word == "--":
            position += 1
            break
        if not word.startswith("-") or word == "-":
            break
        spelling, equals, value = word.partition("=")
        option, switch = _find(spelling, table)
        position += 1
        if not option.metavar:
            if equals:
                raise ConfigError(f"{spelling} takes no value, but was given {value!r}")
            values[option.name] = switch
            continue
        if not equals:
            if position == len(argv):
                raise ConfigError(f"{spelling} needs a value: {spelling} {option.metavar}")
            value = argv[position]
            position += 1
        values[option.name] = value
    return Parsed(values, tuple(argv[position:]))


def _spellings(options: Iterable[Option]) -> dict[str, tuple[Option, bool]]:
    table: dict[str, tuple[Option, bool]] = {}
    for option in options:
        table[option.flag] = (option, True)
        if option.short is not None:
            table[option.short] = (option, True)
        if option.negatable:
            table[f"--no_{option.name}"] = (option, False)
    return table


def _find(spelling: str, table: Mapping[str, tuple[Option, bool]]) -> tuple[Option, bool]:
    known = spelling if not spelling.startswith("--") else "--" + spelling[2:].replace("-", "_")
    if known in table:
        return table[known]
    close = nearest(known.lstrip("-"), (flag.lstrip("-") for flag in table))
    hint = f"did you mean --{close}?" if close else "--help lists what there is"
    raise ConfigError(f"unknown option {spelling}; {hint}")

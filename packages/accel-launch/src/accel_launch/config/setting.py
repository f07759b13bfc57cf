"""One setting: type, names and accepted values, read from the field that declares it."""

import dataclasses
import difflib
import re
import types
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any, final, get_args

from accel_state.errors import ConfigError

_METADATA_KEY = "accel"
_TRUE = frozenset({"1", "true", "yes", "on", "y", "t"})
_FALSE = frozenset({"0", "false", "no", "off", "n", "f"})
_DURATION = r"(?:(\d+(?:\.\d+)?)h)?(?:(\d+(?:\.\d+)?)m)?(?:(\d+(?:\.\d+)?)s?)?"


@final
@dataclasses.dataclass(frozen=True, slots=True)
class Facts:
    """Metadata of a configuration field beyond its name, type and default.

    ``env`` and ``aliases`` are further spellings of the field's name: other programs' variables and file keys. The
    launcher also writes the first of ``env`` for its processes, where other programs read it. A value may match
    ``pattern`` instead of one of the ``choices``, if another package accepts more than can be listed; texts that are
    ``folded`` are converted to lower case. ``listed`` texts may be lists in a file, and become one text joined by
    ``separator``; with a separator other than a comma, a text is taken unchanged.

    ``section`` is the mapping of Accelerate's files that holds the setting, there also without ``prefix``. ``needs``
    names the setting that must be on (or have a value, ``name=value``) for this one to have an effect. A ``valued``
    boolean is given on the command line as true or false instead of as a switch.

    ``strategy`` names the backend that a switch requests; settings that need the switch are options of the backend,
    called ``option`` there if that is not the setting's name without ``prefix``.
    """

    help: str
    group: str
    choices: tuple[str, ...] = ()
    pattern: str = ""
    minimum: float | None = None
    maximum: float | None = None
    env: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    short: str | None = None
    launch_only: bool = False
    section: str = ""
    prefix: str = ""
    needs: str = ""
    valued: bool = False
    folded: bool = False
    listed: bool = False
    separator: str = ","
    strategy: str = ""
    option: str = ""


def setting(default: Any, facts: Facts) -> Any:
    """Declares one field of the configuration.

    Returns ``Any`` as ``dataclasses.field`` does, so that the annotation beside it decides the static type.
    """
    return dataclasses.field(default=default, metadata={_METADATA_KEY: facts})


@final
@dataclasses.dataclass(frozen=True, slots=True)
class Setting:
    """One row of the table from which resolution, the command line, its help and ``accel config show`` derive."""

    name: str
    type: type
    optional: bool
    default: object
    facts: Facts

    @property
    def variables(self) -> tuple[str, ...]:
        """Environment variables of this setting, in order of precedence."""
        return (f"ACCEL_{self.name.upper()}", *self.facts.env)

    @property
    def keys(self) -> tuple[str, ...]:
        """Keys of this setting in a file."""
        return (self.name, *self.facts.aliases)

    @property
    def section_keys(self) -> tuple[str, ...]:
        """Keys of this setting inside its section of Accelerate's files; none without a section."""
        if not self.facts.section:
            return ()
        return tuple(dict.fromkeys((*self.keys, self.name.removeprefix(self.facts.prefix))))

    @property
    def option(self) -> str:
        """Name of the option of the backend whose switch this setting needs."""
        return self.facts.option or self.name.removeprefix(self.facts.prefix)

    @property
    def is_switch(self) -> bool:
        """Whether its flag takes no value."""
        return self.type is bool and not self.facts.valued

    def is_on(self, value: object) -> bool:
        """Whether ``value`` satisfies the settings that need this one."""
        return value not in (None, False, self.default)

    @property
    def expected(self) -> str:
        """Describes valid values, for help texts and errors."""
        if self.facts.choices:
            return f"one of {', '.join(self.facts.choices)}"
        words = _KINDS[self.type].words
        low, high = self.facts.minimum, self.facts.maximum
        if low is not None and high is not None:
            return f"{words} from {low} to {high}"
        return f"{words} of at least {low}" if low is not None else words

    def parse(self, value: object, where: str) -> object:
        """Converts ``value``, given as text or as an object, to this setting's type.

        Raises:
            ConfigError: names the setting, the origin ``where``, what was expected and the nearest value that works.
        """
        if value is None and self.optional:
            return None
        try:
            parsed = self._normal(_KINDS[self.type].parse(self._joined(value)))
        except (ValueError, TypeError, OverflowError):
            raise self._refusal(value, where) from None
        if self.facts.choices and parsed not in self.facts.choices and not self._matches(parsed):
            raise self._refusal(value, where)
        if not self._in_range(parsed):
            raise self._refusal(value, where)
        return parsed

    def dump(self, value: object) -> object:
        """Converts ``value`` to JSON; ``parse`` is the inverse."""
        return value.total_seconds() if isinstance(value, timedelta) else value

    def text(self, value: object) -> str:
        """Formats ``value`` for a variable or a command line."""
        return str(self.dump(value)).lower() if isinstance(value, bool) else str(self.dump(value))

    def _joined(self, value: object) -> object:
        separator = self.facts.separator
        if not self.facts.listed or (separator != "," and not isinstance(value, list | tuple)):
            return value
        parts = value if isinstance(value, list | tuple) else str(value).strip("()[]").split(",")
        return separator.join(str(part).strip() for part in parts if str(part).strip())

    def _normal(self, value: object) -> object:
        """Returns the canonical spelling of a ``value`` that matches a choice case-insensitively; others unchanged."""
        if not isinstance(value, str):
            return value
        if self.facts.folded:
            value = value.lower()
        known = {choice.lower(): choice for choice in self.facts.choices}
        return value if value in self.facts.choices else known.get(value.lower(), value)

    def _matches(self, value: object) -> bool:
        return bool(self.facts.pattern) and re.fullmatch(self.facts.pattern, str(value)) is not None

    def _in_range(self, value: object) -> bool:
        number = value.total_seconds() if isinstance(value, timedelta) else value
        if not isinstance(number, int | float):
            return True
        low, high = self.facts.minimum, self.facts.maximum
        return (low is None or number >= low) and (high is None or number <= high)

    def _refusal(self, value: object, where: str) -> ConfigError:
        near = self._nearest(value)
        hint = f"; nearest that works: {near}" if near is not None else ""
        return ConfigError(f"{self.name} is {value!r} ({where}), expected {self.expected}{hint}")

    def _nearest(self, value: object) -> str | None:
        if self.facts.choices:
            folded = {choice.lower(): choice for choice in self.facts.choices}
            close = nearest(str(value).lower(), folded)
            return None if close is None else folded[close]
        low, high = self.facts.minimum, self.facts.maximum
        try:
            number = float(str(value))
        except ValueError:
            return None
        if low is not None and number < low:
            return str(low)
        return str(high) if high is not None and number > high else None


def settings_of(table: type) -> dict[str, Setting]:
    """Settings that the dataclass ``table`` declares, in order; fields without ``Facts`` are not settings."""
    return {
        field.name: Setting(field.name, *_split_optional(field.type), field.default, field.metadata[_METADATA_KEY])
        for field in dataclasses.fields(table)
        if _METADATA_KEY in field.metadata
    }


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name most similar to ``name``; None if none is similar."""
    found = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return found[0] if found else None


def _split_optional(annotation: Any) -> tuple[type, bool]:
    if isinstance(annotation, types.UnionType):
        (inner,) = (arg for arg in get_args(annotation) if arg is not types.NoneType)
        return inner, True
    return annotation, False


def _parse_bool(value: object) -> bool:
    if isinstance(value, bool):
        return value
    word = str(value).strip().lower()
    if word in _TRUE:
        return True
    if word in _FALSE:
        return False
    raise ValueError(word)


def _parse_int(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise TypeError(value)
    return int(value)


def _parse_float(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise TypeError(value)
    return float(value)


def _parse_text(value: object) -> str:
    if isinstance(value, bool | int | float) or not str(value):
        raise TypeError(value)
    return str(getattr(value, "value", value))


def _parse_duration(value: object) -> timedelta:
    if isinstance(value, timedelta):
        return value
    if isinstance(value, str):
        match = re.fullmatch(_DURATION, value.strip().lower())
        if match is None or not any(match.groups()):
            raise ValueError(value)
        hours, minutes, seconds = (float(part or 0) for part in match.groups())
        return timedelta(hours=hours, minutes=minutes, seconds=seconds)
    return timedelta(seconds=_parse_float(value))


@final
@dataclasses.dataclass(frozen=True, slots=True)
class _Kind:
    words: str
    metavar: str
    parse: Callable[[object], object]


_KINDS: dict[type, _Kind] = {
    bool: _Kind("true or false", "BOOL", _parse_bool),
    int: _Kind("a whole number", "INT", _parse_int),
    float: _Kind("a number", "FLOAT", _parse_float),
    str: _Kind("a text", "TEXT", _parse_text),
    timedelta: _Kind("seconds, or a duration like 90s, 10m or 1h30m", "DURATION", _parse_duration),
}


def metavar(row: Setting) -> str:
    """Placeholder of the value in help texts: a type in capitals; empty for a switch."""
    if row.is_switch:
        return ""
    return "NAME" if row.facts.choices else _KINDS[row.type].metavar

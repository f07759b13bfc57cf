"""Which value every setting has: call over flag over environment over file over default."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import final

from accel.config.files import read_entries
from accel.config.model import (
    DOCUMENT_VARIABLE,
    FILE_VARIABLE,
    PRECEDENCE,
    AccelConfig,
    Origin,
    Source,
    known_setting,
    settings,
)
from accel.config.setting import nearest
from accel_state.errors import ConfigError

_PREFIX = "ACCEL_"
_NOTHING: Mapping[str, object] = MappingProxyType({})


@final
@dataclass(frozen=True, slots=True)
class Candidate:
    """One value that somebody gave a setting, and who."""

    name: str
    value: object
    origin: Origin


def resolve_config(
    call: Mapping[str, object],
    env: Mapping[str, str],
    file: str | Path | None = None,
    *,
    flags: Mapping[str, object] = _NOTHING,
) -> AccelConfig:
    """The configuration that ``call``, ``flags``, ``env`` and ``file`` give together, strongest first.

    ``call`` holds constructor arguments and ``flags`` what was typed on the command line, both by setting name; None
    means not given. ``env`` may hold the document of a launcher (``ACCEL_CONFIG``): its values keep the origins they
    had there, so that a flag given to the launcher beats a variable here. ``file`` is YAML or JSON; without one
    ``ACCEL_CONFIG_FILE`` may name it, and no other file is ever read.

    Raises:
        ConfigError: for an unknown name or a value that does not fit, naming the place, what was expected and what
            comes nearest.
    """
    path = file or env.get(FILE_VARIABLE) or None
    candidates = [
        *_from_mapping(call, "call"),
        *_from_mapping(flags, "flag"),
        *_from_environment(env),
        *(_from_file(Path(path)) if path is not None else ()),
        *_from_document(env.get(DOCUMENT_VARIABLE, "")),
    ]
    chosen: dict[str, Candidate] = {}
    for candidate in candidates:
        best = chosen.get(candidate.name)
        if best is None or _rank(candidate.origin.source) < _rank(best.origin.source):
            chosen[candidate.name] = candidate
    values: dict[str, object] = {
        name: settings()[name].parse(candidate.value, str(candidate.origin)) for name, candidate in chosen.items()
    }
    origins = {name: chosen[name].origin if name in chosen else Origin("default") for name in settings()}
    # The table decides the types of the values, which a type checker cannot follow through a mapping.
    return AccelConfig(**values, origins=origins)  # type: ignore[arg-type]


def unknown_variables(env: Mapping[str, str]) -> dict[str, str]:
    """Variables of ``env`` that look like a misspelt setting, each with the name that was probably meant.

    They are reported, not refused: a foreign program may own a variable that starts with ``ACCEL_``.
    """
    known = {row.name.upper() for row in settings().values()}
    others = (DOCUMENT_VARIABLE, FILE_VARIABLE)
    words = (name.removeprefix(_PREFIX) for name in env if name.startswith(_PREFIX) and name not in others)
    strangers = (word for word in words if word not in known)
    return {_PREFIX + word: _PREFIX + close for word in strangers if (close := nearest(word, known)) is not None}


def _rank(source: Source) -> int:
    return PRECEDENCE.index(source)


def _from_mapping(given: Mapping[str, object], source: Source) -> Iterator[Candidate]:
    for name, value in given.items():
        row = known_setting(name, source)
        if value is not None:
            yield Candidate(row.name, value, Origin(source, f"--{row.name}" if source == "flag" else ""))


def _from_environment(env: Mapping[str, str]) -> Iterator[Candidate]:
    for row in settings().values():
        # An empty variable counts as not set, as shells and schedulers leave them.
        for variable in row.variables:
            if env.get(variable):
                value = env[variable].lower() if row.facts.choices else env[variable]
                yield Candidate(row.name, value, Origin("env", variable))
                break


def _from_file(path: Path) -> Iterator[Candidate]:
    names = {key: row.name for row in settings().values() for key in row.keys}
    seen: dict[str, int] = {}
    for entry in read_entries(path):
        key, place = entry.key.replace("-", "_"), f"{path}:{entry.line}"
        if key not in names:
            close = nearest(key, names)
            hint = f"did you mean {close}?" if close else f"known: {', '.join(settings())}"
            raise ConfigError(f"{place}: unknown key {entry.key!r}; {hint}")
        name = names[key]
        if name in seen:
            raise ConfigError(f"{place}: {name} is given twice, first on line {seen[name]}")
        seen[name] = entry.line
        if entry.value is not None:
            yield Candidate(name, entry.value, Origin("file", place))


def _from_document(text: str) -> Iterator[Candidate]:
    if not text:
        return
    try:
        document = json.loads(text)
        values, origins = document["values"], document["origins"]
        found = [Candidate(name, values[name], Origin(*origins[name])) for name in values]
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(
            f"{DOCUMENT_VARIABLE} holds {text[:80]!r}, which accel launch did not write; unset it"
        ) from error
    for candidate in found:
        # A newer launcher may know settings that this version does not.
        if candidate.name in settings() and candidate.origin.source in PRECEDENCE:
            yield candidate

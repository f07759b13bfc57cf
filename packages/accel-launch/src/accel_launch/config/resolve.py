"""Resolution of every setting: call over flag over environment over file over default."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import final

from accel_launch.config import accelerate_files
from accel_launch.config.files import FileEntry, read_entries
from accel_launch.config.model import (
    DOCUMENT_VARIABLE,
    FILE_VARIABLE,
    PRECEDENCE,
    AccelConfig,
    Origin,
    Source,
    known_setting,
    settings,
)
from accel_launch.config.setting import nearest
from accel_state.errors import ConfigError

_PREFIX = "ACCEL_"
_NOTHING: Mapping[str, object] = MappingProxyType({})


@final
@dataclass(frozen=True, slots=True)
class SettingValue:
    """One given value of a setting, and its origin."""

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
    """Resolves the configuration of ``call``, ``flags``, ``env`` and ``file``, strongest first.

    ``call`` holds constructor arguments and ``flags`` command-line options, both by setting name; None means not given.
    ``env`` may hold the document of a launcher (``ACCEL_CONFIG``), whose values keep their origins, so that a flag of
    the launcher overrides a variable of this process. ``file`` is YAML or JSON; without it, ``ACCEL_CONFIG_FILE`` may
    name a file, and no other file is ever read.

    Raises:
        ConfigError: an unknown name or an invalid value; names the place, what was expected and the nearest that works.
    """
    path = file or env.get(FILE_VARIABLE) or None
    candidates = [
        *_from_mapping(call, "call"),
        *_from_mapping(flags, "flag"),
        *_from_environment(env),
        *(_from_file(Path(path)) if path is not None else ()),
        *_from_document(env.get(DOCUMENT_VARIABLE, "")),
    ]
    chosen: dict[str, SettingValue] = {}
    for candidate in candidates:
        best = chosen.get(candidate.name)
        if best is None or _rank(candidate.origin.source) < _rank(best.origin.source):
            chosen[candidate.name] = candidate
    values: dict[str, object] = {
        name: settings()[name].parse(candidate.value, str(candidate.origin)) for name, candidate in chosen.items()
    }
    origins = {name: chosen[name].origin if name in chosen else Origin("default") for name in settings()}
    _give_way(values, origins)
    # The table determines the types of the values, which a type checker cannot follow through a mapping.
    return AccelConfig(**values, origins=origins)  # type: ignore[arg-type]


def without_launcher(env: Mapping[str, str]) -> dict[str, str]:
    """Returns ``env`` without the variables that ``accel launch`` wrote for this process."""
    document = env.get(DOCUMENT_VARIABLE)
    if not document:
        return dict(env)
    try:
        written = resolve_config({}, {DOCUMENT_VARIABLE: document}).variables()
    except ConfigError:
        written = {}  # written by a newer launcher, or by none
    return {name: value for name, value in env.items() if name != DOCUMENT_VARIABLE and written.get(name) != value}


_EXCLUSIVE = (("cpu", "multi_gpu", "tpu"), ("use_fsdp", "use_deepspeed", "use_megatron_lm"))


def _give_way(values: dict[str, object], origins: dict[str, Origin]) -> None:
    """Turns off settings that a stronger source excludes: ``--cpu`` over a file's ``distributed_type: MULTI_GPU``.

    If one source turns on both, both stay on, and the launcher refuses them.
    """
    for group in _EXCLUSIVE:
        on = [name for name in group if values.get(name) is True]
        strongest = min((_rank(origins[name].source) for name in on), default=0)
        (winner, *_) = [name for name in on if _rank(origins[name].source) == strongest] or [""]
        for name in on:
            if _rank(origins[name].source) > strongest:
                values[name] = False
                origins[name] = Origin(origins[winner].source, f"{origins[winner].detail}, which excludes it")


def unknown_variables(env: Mapping[str, str]) -> dict[str, str]:
    """Variables of ``env`` that look like misspelt settings, each with the probable name.

    They are reported, not refused: another program may own a variable that starts with ``ACCEL_``.
    """
    known = {row.name.upper() for row in settings().values()}
    others = (DOCUMENT_VARIABLE, FILE_VARIABLE)
    words = (name.removeprefix(_PREFIX) for name in env if name.startswith(_PREFIX) and name not in others)
    strangers = (word for word in words if word not in known)
    return {_PREFIX + word: _PREFIX + close for word in strangers if (close := nearest(word, known)) is not None}


def _rank(source: Source) -> int:
    return PRECEDENCE.index(source)


def _from_mapping(given: Mapping[str, object], source: Source) -> Iterator[SettingValue]:
    for name, value in given.items():
        row = known_setting(name, source)
        if value is not None:
            yield SettingValue(row.name, value, Origin(source, f"--{row.name}" if source == "flag" else ""))


def _from_environment(env: Mapping[str, str]) -> Iterator[SettingValue]:
    for row in settings().values():
        # An empty variable counts as not set, because shells and schedulers leave empty variables.
        for variable in row.variables:
            if env.get(variable):
                yield SettingValue(row.name, env[variable], Origin("env", variable))
                break


def mistakes_in(path: Path) -> list[str]:
    """Errors of single keys and values of a file, each with its line.

    Raises:
        ConfigError: the file cannot be read as keys and values at all.
    """
    found = []
    for entry in read_entries(path, _SECTIONS):
        place = f"{path}:{entry.line}"
        try:
            for name, value in _meaning(entry, place).items():
                if value is not None:
                    settings()[name].parse(value, f"file {place}")
        except ConfigError as error:
            found.append(str(error))
    return found


_SECTIONS = (*accelerate_files.SECTIONS, "ipex_config", "tp_config")


def _from_file(path: Path) -> Iterator[SettingValue]:
    found: dict[str, SettingValue] = {}
    implied: set[str] = set()
    for entry in read_entries(path, _SECTIONS):
        place = f"{path}:{entry.line}"
        for name, value in _meaning(entry, place).items():
            new = SettingValue(name, value, Origin("file", place))
            if name in found and name not in implied and entry.key != accelerate_files.KIND:
                first = found[name].origin.detail.rpartition(":")[2]
                raise ConfigError(f"{place}: {name} is given twice, first on line {first}")
            # distributed_type implies a switch, which those files also write, as false.
            if name not in found or _is_true(value):
                found[name] = new
            if entry.key == accelerate_files.KIND:
                implied.add(name)
    for candidate in found.values():
        if candidate.value is not None and not (candidate.value == [] and settings()[candidate.name].facts.listed):
            yield candidate


def _is_true(value: object) -> bool:
    return str(value).lower() == "true"


def _meaning(entry: FileEntry, place: str) -> Mapping[str, object]:
    """Settings of a file's entry, ours or one of Accelerate's.

    Raises:
        ConfigError: an unknown key; names the nearest known one of the same section.
    """
    key = entry.key.replace("-", "_")
    names = keys_of(entry.section)
    if key in names:
        return {names[key]: entry.value}
    if not entry.section and key in accelerate_files.SECTIONS and entry.value in (None, {}, []):
        return {}  # an empty section
    if not entry.section and key in accelerate_files.SECTIONS:
        raise ConfigError(
            f"{place}: {entry.key} is {entry.value!r}; expected its keys, each on an indented line below it"
        )
    translated = accelerate_files.special(entry.section, key, entry.value, place)
    if translated is not None:
        return translated
    where = f" in {entry.section}" if entry.section else ""
    others = [name.removeprefix(f"{entry.section}.") for name in accelerate_files.known_names()]
    close = nearest(key, [*names, *others, *(() if entry.section else accelerate_files.SECTIONS)])
    hint = f"did you mean {close}?" if close else f"known: {', '.join(names)}"
    raise ConfigError(f"{place}: unknown key {entry.key!r}{where}; {hint}")


def keys_of(section: str) -> dict[str, str]:
    """Keys of a section of a file ("" is the top level), each with its setting."""
    rows = settings().values()
    if not section:
        return {key: row.name for row in rows for key in row.keys}
    return {key: row.name for row in rows if row.facts.section == section for key in row.section_keys}


def _from_document(text: str) -> Iterator[SettingValue]:
    if not text:
        return
    try:
        document = json.loads(text)
        values, origins = document["values"], document["origins"]
        found = [SettingValue(name, values[name], Origin(*origins[name])) for name in values]
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(
            f"{DOCUMENT_VARIABLE} holds {text[:80]!r}, which accel launch did not write; unset it"
        ) from error
    for candidate in found:
        # A newer launcher may have settings that this version lacks.
        if candidate.name in settings() and candidate.origin.source in PRECEDENCE:
            yield candidate

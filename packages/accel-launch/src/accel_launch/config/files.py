"""Entries of a configuration file, each with its line."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, final

from accel_state.errors import ConfigError

if TYPE_CHECKING:
    from yaml.nodes import MappingNode, Node

_WRITTEN = frozenset(f"tag:yaml.org,2002:{kind}" for kind in ("str", "bool", "int", "float", "timestamp"))


@final
@dataclass(frozen=True, slots=True)
class FileEntry:
    """One key of a file as written, its value, and its line (from 1).

    A scalar value is the text in the file: YAML would turn ``no`` into false and ``1:30`` into 5400, but the setting's
    type decides how to parse it. Lists and mappings hold plain values. An entry of a mapping that was read as a section
    carries the section's name.
    """

    key: str
    value: object
    line: int
    section: str = ""


def read_entries(path: Path, sections: Collection[str] = ()) -> tuple[FileEntry, ...]:
    """Reads the entries of a YAML or JSON file in order: the top-level ones, and those of mappings named ``sections``.

    JSON is parsed by the YAML reader too, which records lines. Only plain values are constructed.

    Raises:
        ConfigError: the file is missing or unreadable, has a syntax error (with its line), or gives a key twice.
    """
    import yaml

    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the configuration file {str(path)!r}: {_reason(error)}") from error
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{path}:{mark.line + 1}" if mark is not None else str(path)
        problem = getattr(error, "problem", None) or str(error)
        raise ConfigError(f"{place}: not valid YAML or JSON: {problem}") from error
    if root is None:
        return ()
    if not isinstance(root, yaml.MappingNode):
        found = "a list" if isinstance(root, yaml.SequenceNode) else "a single value"
        raise ConfigError(f"{path}:1: expected lines of the form 'name: value', found {found}")
    return tuple(_entries(root, path, sections))


def _entries(root: "MappingNode", path: Path, sections: Collection[str], section: str = "") -> Iterator[FileEntry]:
    import yaml

    lines: dict[str, int] = {}
    for key_node, value_node in root.value:
        key, line = str(_plain(key_node, path)), key_node.start_mark.line + 1
        if key in lines:
            raise ConfigError(f"{path}:{line}: {key} is given twice, first on line {lines[key]}")
        lines[key] = line
        if not section and key in sections and isinstance(value_node, yaml.MappingNode):
            yield from _entries(value_node, path, (), key)
        else:
            yield FileEntry(key, _plain(value_node, path), line, section)


def _plain(node: "Node", path: Path) -> object:
    import yaml
    from yaml.constructor import SafeConstructor
    from yaml.nodes import ScalarNode

    if isinstance(node, ScalarNode) and node.tag in _WRITTEN:
        return str(node.value)
    try:
        value: object = SafeConstructor().construct_document(node)
    except yaml.YAMLError as error:
        problem = getattr(error, "problem", None) or str(error)
        raise ConfigError(f"{path}:{node.start_mark.line + 1}: {problem}") from error
    return value


def _reason(error: Exception) -> str:
    return (error.strerror or str(error)) if isinstance(error, OSError) else "it is not UTF-8 text"

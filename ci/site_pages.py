"""Pages of the site that are generated from the sources: the API of each package, the commands, and the settings.

Pure functions from sources to Markdown. ``ci/site_hook.py`` adds the pages to the site while mkdocs builds it; nothing
here needs mkdocs or torch.
"""

import ast
import re
import sys
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SOURCES = [*sorted(ROOT.glob("packages/*/src")), ROOT / "testing" / "src"]
API, COMMANDS, SETTINGS = "reference/api", "reference/command-line.md", "reference/settings.md"
MIGRATION = "reference/migration.md"
ROLE = re.compile(r":(?:attr|class|data|exc|func|meth|mod):<code>(?:~[\w.]+\.(?=\w+</code>))?")
"""What docstrings write before a name for Sphinx, with the path that a tilde hides."""


@dataclass(frozen=True, slots=True)
class Export:
    """A public name: the module that exports it, and the module and name where it is defined or taken from."""

    exporter: str
    name: str
    module: str
    original: str


def without_roles(html: str) -> str:
    """A page whose names from docstrings are shown as code, without Sphinx's markup before them."""
    return ROLE.sub("<code>", html)


def stubs() -> dict[str, Path]:
    """The file that lists the public names of each package and subpackage, by import path."""
    found: dict[str, Path] = {}
    for base in SOURCES:
        for package in sorted(base.iterdir()):
            if (package / "__init__.py").exists():
                stub = package / "__init__.pyi"
                found[package.name] = stub if stub.exists() else package / "__init__.py"
        for file in sorted(base.rglob("__init__.pyi")):
            found.setdefault(".".join(file.parent.relative_to(base).parts), file)
    return dict(sorted(found.items()))


def statements(file: Path) -> Iterator[ast.stmt]:
    """The statements of a module, and those that only type checkers read."""
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        yield from node.body if isinstance(node, ast.If) else [node]


def exports_of(path: str, file: Path) -> list[Export]:
    """The names that a stub re-exports as ``from module import name as name``; version and private names left out."""
    listed = []
    for node in statements(file):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            listed += [
                Export(path, alias.asname, node.module, alias.name)
                for alias in node.names
                if alias.asname and not alias.asname.startswith("_")
            ]
    return sorted(listed, key=lambda export: (export.name.lower(), export.name))


@cache
def exported() -> Mapping[str, list[Export]]:
    """All exports by the module that makes them public."""
    return {path: exports_of(path, file) for path, file in stubs().items()}


def module_file(module: str) -> Path | None:
    """The file that lists or defines the names of a module; None of a module of others."""
    parts = module.split(".")
    for base in SOURCES:
        stem = base.joinpath(*parts)
        for file in (stem / "__init__.pyi", stem / "__init__.py", stem.with_suffix(".py")):
            if file.exists():
                return file
    return None


@cache
def imported(module: str) -> Mapping[str, tuple[str, str]]:
    """The names that a module takes from others: by name, the module and the name there; none of a module of others."""
    file = module_file(module)
    return {
        alias.asname or alias.name: (node.module, alias.name)
        for node in (statements(file) if file else ())
        if isinstance(node, ast.ImportFrom) and node.module and not node.level
        for alias in node.names
    }


def is_written(module: str, name: str) -> bool:
    """Whether a module defines a name in its text; otherwise it makes the name while it runs, without an entry."""
    file = module_file(module)
    for node in statements(file) if file else ():
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and node.name == name:
            return True
        if any(
            isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store) and part.id == name
            for part in ast.walk(node)
        ):
            return True
    return False


def origin(export: Export) -> tuple[str, str]:
    """The module and name where an export is defined, through all re-exports."""
    module, name = export.module, export.original
    while name in imported(module):
        module, name = imported(module)[name]
    return module, name


def public_names() -> set[str]:
    """All public names of all packages, as ``name`` and as ``package.name``."""
    rows = [export for listed in exported().values() for export in listed]
    return {export.name for export in rows} | {f"{export.exporter}.{export.name}" for export in rows}


def summary(package: str) -> str:
    """The first paragraph of a package's docstring, on one line."""
    (file,) = (base / package / "__init__.py" for base in SOURCES if (base / package).is_dir())
    text = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or package
    return " ".join(text.partition("\n\n")[0].split())


def api_page(package: str) -> str:
    """Reference of one distribution: names that it defines in full, names of other packages as links."""
    lines = [f"# {package}", "", summary(package), ""]
    shown: set[tuple[str, str]] = set()
    for path, listed in exported().items():
        if path.split(".")[0] != package or not listed:
            continue
        own = [export for export in listed if origin(export)[0].split(".")[0] == package]
        full = [export for export in own if origin(export) not in shown and is_written(*origin(export))]
        lines += [f"## {path}", ""]
        for export in full:
            module, name = origin(export)
            shown.add((module, name))
            lines += [f"::: {module}.{name}", ""]
        links = [export for export in listed if export not in full]
        if links:
            lines += [f"Also importable from `{path}`:" if full else "Importable from here:", ""]
            lines += ["| name | reference |", "| --- | --- |", *map(link, links), ""]
    return "\n".join(lines)


def link(export: Export) -> str:
    """A row of a table that leads to the full entry of a name."""
    module, name = origin(export)
    if not is_written(module, name):
        return f"| `{export.name}` | made by `{module}` when it is asked for |"
    return f"| `{export.name}` | [{module.split('.')[0]}][{module}.{name}] |"


def packages() -> list[str]:
    """Import names of all distributions, the front door first."""
    return sorted((path for path in stubs() if "." not in path), key=lambda name: (name != "accel", name))


def commands() -> dict[str, tuple[str, str]]:
    """Import path and line of help of each command of ``accel``, those of other packages included."""
    app = import_module("accel_launch.cli.app")
    found: dict[str, tuple[str, str]] = dict(app.COMMANDS)
    for base in SOURCES:
        project = tomllib.loads((base.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        for name, path in project.get("entry-points", {}).get(app.ENTRY_POINTS, {}).items():
            found[name] = (path, app._ELSEWHERE[name][1])
    return dict(sorted(found.items()))


def command_line_page() -> str:
    """Every command with its arguments and options; options of settings are on the page of the settings."""
    lines = ["# Command line", "", f"`accel COMMAND --help` prints the same. {len(commands())} commands:", ""]
    lines += [f"- [`accel {name}`](#accel-{name}): {text}" for name, (_, text) in commands().items()] + [""]
    for name, (path, text) in commands().items():
        lines += [f"## accel {name}", ""]
        try:
            command = resolve_name(path)
        except ModuleNotFoundError as missing:  # a command that needs a library to be imported, in a bare environment
            lines += [text, "", f"Its options are listed where `{missing.name}` is installed.", ""]
            continue
        lines += section(name, command)
    return "\n".join(lines)


def section(name: str, command: Any) -> list[str]:
    """A command's description, usage and options, and those of its subcommands."""
    settings = import_module("accel_launch.config").settings()
    arguments = " ".join(metavar(part) for part in command.params if part.param_type_name == "argument")
    lines = [" ".join((command.help or "").replace("\b", "").split()), ""]
    lines += ["```text", f"accel {name} [OPTIONS] {arguments}".rstrip(), "```", ""]
    options = [part for part in command.params if part.param_type_name == "option"]
    own = [part for part in options if part.name not in settings]
    if own:
        lines += ["| option | meaning |", "| --- | --- |"]
        lines += [f"| {spelling(part)} | {cell(part.help or '')} |" for part in own] + [""]
    if len(own) < len(options):
        lines += [f"It also has an option for each of the {len(options) - len(own)} [settings](settings.md).", ""]
    for child, nested in sorted(getattr(command, "commands", {}).items()):
        lines += [f"### accel {name} {child}", "", *section(f"{name} {child}", nested)]
    return lines


def metavar(argument: Any) -> str:
    """An argument as in a line of usage: in brackets if it is optional, with dots if it takes several."""
    text = (argument.metavar or argument.name or "").upper() + ("..." if argument.nargs == -1 else "")
    return text if argument.required else f"[{text}]"


def spelling(option: Any) -> str:
    """The flags of an option, and its value."""
    flags = ", ".join(f"`{flag}`" for flag in (*option.opts, *option.secondary_opts))
    return flags if option.is_flag else f"{flags} `{option.metavar or option.type.name.upper()}`"


def cell(text: str) -> str:
    """Text in a table: one line, without the sign that ends a cell."""
    return " ".join(text.split()).replace("|", "\\|")


def settings_page() -> str:
    """Every setting with its flag, variables, file keys, values and default, by group."""
    table = import_module("accel_launch.config").settings()
    lines = [
        "# Settings",
        "",
        f"The {len(table)} settings of a run. Each has a flag of `accel launch`, a key of configuration files, and",
        "variables, the first of which wins. [Configuration](configuration.md) has their precedence.",
        "",
    ]
    for group in dict.fromkeys(row.facts.group for row in table.values()):
        lines += [f"## {group}", ""]
        for row in table.values():
            if row.facts.group == group:
                lines += [f"### {row.name}", "", row.facts.help, "", *facts_of(row), ""]
    return "\n".join(lines)


def facts_of(row: Any) -> Iterator[str]:
    """Lines of a list: what a setting accepts, where it is set, and its default."""
    flags = [f"`{name}`" for name in (row.facts.short, f"--{row.name}") if name]
    yield f"- flag: {', '.join(flags)}"
    yield f"- variables: {', '.join(f'`{name}`' for name in row.variables)}"
    yield f"- file keys: {', '.join(f'`{name}`' for name in row.keys)}" + (
        f", also in the section `{row.facts.section}`" if row.facts.section else ""
    )
    yield f"- value: {row.expected}"
    yield f"- default: {'none' if row.default in (None, '') else f'`{row.default}`'}"
    if row.facts.needs:
        yield f"- has an effect with `{row.facts.needs}`"


def migration_page() -> str:
    """Every rule of ``accel migrate``, and the differences that it does not report."""
    table = import_module("accel_compat.migration.differences")
    lines = [
        "# Rules of accel migrate",
        "",
        "`accel migrate PATH` reports these in scripts written for Accelerate. accel refuses what is a change;",
        "a note is a call that works and means something else. [Intended differences](differences.md) has the reasons.",
        "",
        "| rule | kind | difference | what to do |",
        "| --- | --- | --- | --- |",
    ]
    for one in table.DIFFERENCES:
        told = cell(one.message.replace("{}", "..."))
        lines.append(f"| `{one.rule}` | {one.kind} | {told} | {cell(one.remedy) or 'as the report says'} |")
    lines += ["", "## Not reported", "", "| difference | reason |", "| --- | --- |"]
    return "\n".join([*lines, *(f"| {subject} | {reason} |" for subject, reason in table.UNSEEN.items()), ""])


def pages() -> dict[str, str]:
    """All generated pages: path under ``docs``, and Markdown."""
    for base in SOURCES:
        if str(base) not in sys.path:
            sys.path.append(str(base))
    made = {f"{API}/{package}.md": api_page(package) for package in packages()}
    return {**made, COMMANDS: command_line_page(), MIGRATION: migration_page(), SETTINGS: settings_page()}


def paths() -> list[str]:
    """Paths of the generated pages, without their text."""
    return sorted([*(f"{API}/{package}.md" for package in packages()), COMMANDS, MIGRATION, SETTINGS])

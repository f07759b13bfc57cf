"""``accel config``: questionnaire, and ``show``, ``validate``, ``default``, ``update`` and ``schema``."""

import os
import re
import shutil
import sys
from datetime import timedelta
from pathlib import Path

import rich_click as click

from accel_launch.cli.options import as_json, config_file, config_from, setting_options
from accel_launch.cli.printing import print_json, print_table
from accel_launch.config.model import AccelConfig, settings
from accel_launch.config.resolve import mistakes_in, resolve_config, unknown_variables
from accel_launch.config.setting import Setting
from accel_state.errors import ConfigError

_DEFAULT_FILE = "accel.yaml"


@click.group(invoke_without_command=True)
@click.option(
    "--config_file", metavar="PATH", default=_DEFAULT_FILE, help=f"The file to write, if not {_DEFAULT_FILE}."
)
@click.pass_context
def config(context: click.Context, config_file: str) -> int:
    """Asks what a launch needs to know and writes it to a file; or shows, checks and converts such files."""
    if context.invoked_subcommand is not None:
        return 0
    from accel_launch.cli.questions import TerminalAsker, ask_all, shown_answers
    from accel_launch.launch.host import count_accelerators, has_megatron

    asker, path = TerminalAsker(), Path(config_file)
    known = resolve_config({}, {}, path) if path.exists() else AccelConfig()
    from_file = {row.name: row.value for row in known.explain() if row.origin.source == "file"}
    answers = ask_all(asker, from_file, num_accelerators=count_accelerators(), has_megatron=has_megatron())
    if answers is None:
        raise click.Abort
    chosen = [(name, shown(value)) for name, value in shown_answers(answers)]
    if chosen:
        print_table(["setting", "value"], chosen)
    else:
        print("every setting has its default")
    if asker.choose(f"Write this to {path}?", ["yes", "no"], "yes") != "yes":
        raise click.Abort
    replace_file(path, file_text(resolve_config(answers, {})))
    print(f"wrote {path}; use it with: accel launch --config_file {path} SCRIPT")
    return 0


@config.command()
@setting_options
@config_file
@click.option("--given", "given_only", is_flag=True, help="Leave out what has its default.")
@as_json
def show(config_file: str | None, *, given_only: bool, as_json: bool, **flags: str | bool | None) -> int:
    """Shows the settings of a launch with the same options, and the origin of each value.

    A flag overrides a variable, a variable the file, the file the default.
    """
    config = config_from(flags, config_file)
    if as_json:
        print_json([row for row in rows_as_json(config) if not given_only or row["source"] != "default"])
        return 0
    rows = [row for row in config.explain() if not given_only or row.origin.source != "default"]
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
    """Checks every key and value of a YAML or JSON file; each mistake is reported with its line."""
    from accel_launch.launch.checks import check_settings

    mistakes = mistakes_in(Path(file))
    if len(mistakes) > 1:
        raise ConfigError("\n  ".join([f"{file}: {len(mistakes)} mistakes", *mistakes]))
    # Resolves the file alone, so that no flag or variable hides a wrong value in it.
    config = resolve_config({}, {}, file)
    check_settings(config)
    count = sum(row.origin.source == "file" for row in config.explain())
    print(f"{file}: {count} settings, all valid")
    return 0


@config.command()
@click.option("--output", default=_DEFAULT_FILE, metavar="PATH", help=f"Where to write it, if not {_DEFAULT_FILE}.")
@setting_options
def default(output: str, **flags: str | bool | None) -> int:
    """Writes a file that lists every setting with its default, or with the value that an option here gives it. An
    existing file is never touched.
    """
    path = Path(output)
    given = resolve_config({}, {}, flags=flags)
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(default_text(given))
    except FileExistsError:
        raise ConfigError(f"{path} exists and is left as it is; name another file with --output") from None
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error
    print(f"wrote {path}; use it with --config_file {path}")
    return 0


@config.command()
@click.argument("file")
@click.option("--output", metavar="PATH", help="Where to write the result, if not to the file itself.")
def update(file: str, output: str | None) -> int:
    """Writes a file of this or an older version, or one of Accelerate's, in today's names. A file that is written over
    is kept beside it as FILE.bak.
    """
    known = resolve_config({}, {}, file)
    path, target = Path(file), Path(output or file)
    if target.is_file():
        replace_file(target.with_name(f"{target.name}.bak"), target.read_text(encoding="utf-8"))
    replace_file(target, file_text(known))
    print(f"wrote {target}" + (f"; what was there is in {target.name}.bak" if target == path else ""))
    return 0


@config.command("schema")
def print_schema() -> None:
    """Prints the JSON schema of configuration files, with which editors complete and check them."""
    import json

    from accel_launch.config.schema import schema

    print(json.dumps(schema(), indent=1))


def replace_file(path: Path, text: str) -> None:
    """Replaces the text of a file atomically: readers see the old text or the new one.

    A link stays a link, and the file that it leads to is replaced, in its folder and with its permissions. What is no
    regular file, such as ``/dev/stdout`` or a named pipe, is written to directly.

    Raises:
        ConfigError: the file cannot be written.
    """
    try:
        if path.exists() and not path.is_file():
            path.write_text(text, encoding="utf-8")
            return
        target = Path(os.path.realpath(path))
        staged = target.with_name(f".{target.name}.{os.getpid()}")
        try:
            staged.write_text(text, encoding="utf-8")
            if target.exists():
                shutil.copymode(target, staged)
            os.replace(staged, target)
        finally:
            staged.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error


def file_text(config: AccelConfig) -> str:
    """Formats the given settings of ``config`` as a YAML file, grouped by subject."""
    lines = ["# Settings of accel; 'accel config show --config_file FILE' explains them."]
    group = ""
    for row in settings().values():
        value = getattr(config, row.name)
        if not config.is_given(row.name) or value == row.default:
            continue
        if row.facts.group != group:
            group = row.facts.group
            lines += ["", f"# --- {group} ---"]
        lines.append(f"{row.name}: {quoted(value)}")
    return "\n".join(lines) + "\n"


def quoted(value: object) -> str:
    """Formats a value for a YAML file; text that YAML would read as another type, or not at all, is quoted."""
    import json

    text = shown(value)
    if not isinstance(value, str):
        return text
    plain = re.fullmatch(r"[A-Za-z_/.][\w/.,-]*", text) is not None
    return text if plain and text.lower() not in _WORDS else json.dumps(text)


_WORDS = ("", "yes", "no", "on", "off", "true", "false", "null", "y", "n", "~")


def shown(value: object) -> str:
    """Formats a value for a terminal or a file."""
    if isinstance(value, timedelta):
        return f"{value.total_seconds():.6f}".rstrip("0").rstrip(".") + "s"
    if isinstance(value, bool):
        return str(value).lower()
    return "" if value is None else str(value)


def rows_as_json(config: AccelConfig) -> list[dict[str, object]]:
    """Every setting as plain data: name, value, source and detail of its origin."""
    return [
        {
            "name": row.name,
            "value": settings()[row.name].dump(row.value),
            "source": row.origin.source,
            "detail": row.origin.detail,
        }
        for row in config.explain()
    ]


def default_text(given: AccelConfig | None = None) -> str:
    """Configuration file that lists every setting with its description, commented out at its default or as given."""
    lines = ["# Settings of accel. What is commented out has the value shown; flags and variables win over this file."]
    group = ""
    for row in settings().values():
        if row.facts.group != group:
            group = row.facts.group
            lines += ["", f"# --- {group} ---"]
        lines += _commented(row)
        if given is not None and given.is_given(row.name):
            lines[-1] = f"{row.name}: {quoted(getattr(given, row.name))}"
    return "\n".join(lines) + "\n"


def _commented(row: Setting) -> list[str]:
    return [f"# {row.facts.help} ({row.expected})", f"# {row.name}: {shown(row.default)}".rstrip()]

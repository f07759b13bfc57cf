"""The ``accel`` command group: finds commands, and turns errors into messages."""

import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pkgutil import resolve_name
from typing import final

import rich_click as click
from click.exceptions import NoSuchCommand, NoSuchOption

from accel_launch._version import __version__
from accel_state.entry_points import find_entry_point
from accel_state.errors import AccelError, ConfigError

COMMANDS = {
    "launch": ("accel_launch.cli.launch:launch", "Start a training script on one or many processes."),
    "config": ("accel_launch.cli.config:config", "Ask for, show, check and convert settings."),
    "ckpt": ("accel_launch.cli.ckpt.command:ckpt", "List, check, compare, export and remove checkpoints."),
    "merge-weights": ("accel_launch.cli.ckpt.export:merge_weights", "Write a saved model as plain safetensors."),
    "env": ("accel_launch.cli.env:env", "Versions, devices and settings, for a bug report."),
    "tpu-config": ("accel_launch.cli.tpu_config:tpu_config", "Run commands on all machines of a TPU pod."),
    "to-fsdp2": ("accel_launch.cli.to_fsdp2:to_fsdp2", "Convert a file of Accelerate from FSDP1 to FSDP2."),
    "completion": ("accel_launch.cli.completion:completion", "Print a script that completes commands in a shell."),
}
"""Commands of this package: import path, and line in the list of commands."""

ENTRY_POINTS = "accel.commands"
"""Entry-point group in which other packages add commands: a name, and its ``click.Command``."""

_ELSEWHERE = {
    "plan": ("accel", "Predict memory and speed of every strategy for a model."),
    "estimate-memory": ("accel", "What loading and training a model takes, by dtype."),
    "explain": ("accel", "Say what a script's run would do, and what its steps send."),
    "report": ("accel", "Show a run's own log as one HTML page."),
    "migrate": ("accel-compat", "What to change in scripts that are written for Accelerate."),
    "check": ("accel-testing", "Compare a program under a layout with plain training."),
    "test": ("accel-testing", "Train on this machine's devices in every way; a table of what works."),
}
"""Commands of other accel packages: the package, and the line in the list of commands."""

_SYNONYMS = {"--strategy": "--backend", "--distributed_type": "--backend"}
"""Names of an option in other launchers."""

_BAD_USAGE, _INTERRUPTED = 2, 130  # the second as a shell reports SIGINT


@final
class ListedCommand(click.RichCommand):
    """Entry of the list of commands: name, one-line help, and function that loads the command."""

    def __init__(self, name: str, summary: str, load: Callable[[], click.Command]) -> None:
        super().__init__(name=name, help=summary)
        self.load = load


@final
class CommandLine(click.RichGroup):
    """Group of all commands. Listing imports none of them; entry points are read only for names that are not ours."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Our commands in our order, then those of other packages."""
        from importlib.metadata import entry_points

        for entry in sorted(entry_points(group=ENTRY_POINTS)):
            package = entry.dist.name if entry.dist is not None else entry.value
            owner, line = _ELSEWHERE.get(entry.name, ("", ""))
            summary = line if owner == package else f"From {package}."
            self.commands.setdefault(entry.name, ListedCommand(entry.name, summary, partial(_load_other, entry.name)))
        return list(self.commands)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Returns the listed command of that name."""
        if cmd_name not in self.commands:
            self.list_commands(ctx)
        return self.commands.get(cmd_name)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Returns the command itself, imported now."""
        name, command, rest = super().resolve_command(ctx, args)
        return name, command.load() if isinstance(command, ListedCommand) else command, rest


def command_line() -> CommandLine:
    """Builds the ``accel`` command."""
    group = CommandLine(
        name="accel",
        help="One object around your PyTorch training loop: from one CPU to a cluster.",
        commands={
            name: ListedCommand(name, line, partial(resolve_name, path)) for name, (path, line) in COMMANDS.items()
        },
        context_settings={
            "help_option_names": ["-h", "--help"],
            "token_normalize_func": _normalized,
            "rich_help_config": {"options_table_column_types": ["opt_primary", "metavar", "help"]},
        },
    )
    click.version_option(__version__, message="accel %(version)s")(group)
    return group


def run(argv: Sequence[str]) -> int:
    """Runs one command line (without the program's name) and returns its exit status."""
    try:
        if "_ACCEL_COMPLETE" in os.environ:
            from accel_launch.cli.completion import answer

            return answer()
        return command_line().main(list(argv), "accel", standalone_mode=False) or 0
    except click.UsageError as error:
        print(f"accel: error: {_explain(error, argv)}", file=sys.stderr)
    except AccelError as error:
        print(f"accel: error: {error}", file=sys.stderr)
    except click.Abort:
        return _INTERRUPTED
    return _BAD_USAGE


def _explain(error: click.UsageError, argv: Sequence[str]) -> str:
    """Explains a usage error: names an unknown word and the nearest known one; other errors as click does."""
    if isinstance(error, NoSuchOption):
        typed = (word.partition("=")[0] for word in argv)
        name = next((word for word in typed if _normalized(word) == _normalized(error.option_name)), error.option_name)
        near = [_SYNONYMS[error.option_name]] if error.option_name in _SYNONYMS else error.possibilities
        return f"unknown option {name}; {_hint(near, '')}"
    if isinstance(error, NoSuchCommand):
        assert error.ctx is not None
        if error.command_name in _ELSEWHERE and error.ctx.command_path == "accel":
            package, _ = _ELSEWHERE[error.command_name]
            missing = f"accel {error.command_name} comes with {package}, which is not installed here"
            folders = "./packages/*" + " ./testing" * (package == "accel-testing")  # with what the package builds on
            return f"{missing}; from a checkout: pip install {folders}"
        prefix = f"{error.ctx.command_path} ".removeprefix("accel ")
        return f"unknown command '{prefix}{error.command_name}'; {_hint(error.possibilities, prefix)}"
    return error.format_message()


def _hint(near: Sequence[str] | None, prefix: str) -> str:
    return f"did you mean {prefix}{near[0]}?" if near else "--help lists what there is"


def _normalized(token: str) -> str:
    """Normalizes the spelling of options: ``--num-processes`` and ``--num_processes`` are equivalent."""
    return token.replace("-", "_")


def _load_other(name: str) -> click.Command:
    entry = find_entry_point(ENTRY_POINTS, name, ConfigError)
    if entry is None:
        raise ConfigError(f"accel {name} is not installed any more")
    try:
        command = entry.load()
    except Exception as error:
        raise ConfigError(f"accel {entry.name} cannot be loaded from {entry.value}: {error}") from error
    if not isinstance(command, click.Command):
        raise ConfigError(f"accel {entry.name} is {entry.value}, a {type(command).__name__}; expected a click.Command")
    return command

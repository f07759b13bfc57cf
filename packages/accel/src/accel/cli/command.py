"""What a command of ``accel`` is, and the list of them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import final

from accel.cli.option import HELP, Option, Parsed


@final
@dataclass(frozen=True, slots=True)
class Command:
    """One command: what it takes and the function that does it and gives the exit status.

    ``usage`` is what follows the options. A command that takes a ``program`` leaves everything after its name alone.
    """

    name: str
    text: str
    options: tuple[Option, ...]
    run: Callable[[Parsed], int]
    usage: str = ""

    @property
    def all_options(self) -> tuple[Option, ...]:
        """Its own options and help."""
        return (*self.options, HELP)


@final
@dataclass(frozen=True, slots=True)
class Listing:
    """A command before it is loaded: where it is, and the line about it in the list."""

    path: str
    summary: str

    def load(self) -> Command:
        """The command itself; only the one that was asked for is ever imported."""
        module, _, name = self.path.partition(":")
        command = getattr(import_module(module), name)
        assert isinstance(command, Command)
        return command


COMMANDS: Mapping[str, Listing] = {
    "launch": Listing("accel.cli.launch:LAUNCH", "Start a training script on one or many processes."),
    "config show": Listing("accel.cli.config:SHOW", "Every setting with its value and where it came from."),
    "config validate": Listing("accel.cli.config:VALIDATE", "Check a configuration file."),
    "config default": Listing("accel.cli.config:DEFAULT", "Write a configuration file that lists every setting."),
    "env": Listing("accel.cli.env:ENV", "Versions, devices and settings, for a bug report."),
}

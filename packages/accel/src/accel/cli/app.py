"""The ``accel`` command: finds the command that was asked for and turns errors into messages."""

import sys
from collections.abc import Sequence

from accel.cli.command import COMMANDS, Command
from accel.cli.option import HELP, Option, parse_options
from accel.config.setting import nearest
from accel_state.errors import AccelError, ConfigError

_VERSION = Option("version", "Show the version and end.")
_BAD_USAGE = 2


def run(argv: Sequence[str]) -> int:
    """Runs one command line (without the program's name) and gives its exit status."""
    try:
        parsed = parse_options(argv, (_VERSION, HELP))
        if parsed.on("version"):
            from accel._version import __version__

            print(f"accel {__version__}")
            return 0
        if not parsed.rest or parsed.on("help"):
            _print_commands("accel")
            return 0 if parsed.on("help") else 1
        return _run_named(parsed.rest)
    except AccelError as error:
        print(f"accel: error: {error}", file=sys.stderr)
        return _BAD_USAGE


def _run_named(words: Sequence[str]) -> int:
    names = [name for name in (" ".join(words[:count]) for count in (2, 1)) if name in COMMANDS]
    if names:
        command = COMMANDS[names[0]].load()
        return _run_command(command, words[len(names[0].split()) :])
    group = words[0]
    members = [name for name in COMMANDS if name.startswith(f"{group} ")]
    if members and (len(words) == 1 or words[1] in (HELP.flag, HELP.short)):
        _print_commands(f"accel {group}", f"{group} ")
        return 0 if len(words) > 1 else 1
    asked = " ".join(words[:2]) if members else group
    known = members or sorted({name.partition(" ")[0] for name in COMMANDS})
    close = nearest(asked, known)
    hint = f"did you mean {close}?" if close else f"there are: {', '.join(known)}"
    raise ConfigError(f"unknown command {asked!r}; {hint}")


def _run_command(command: Command, argv: Sequence[str]) -> int:
    parsed = parse_options(argv, command.all_options)
    if parsed.on("help"):
        from accel.cli.help import print_help

        print_help(f"accel {command.name} [OPTIONS] {command.usage}".rstrip(), command.text, command.all_options)
        return 0
    return command.run(parsed)


def _print_commands(program: str, prefix: str = "") -> None:
    from accel.cli.help import print_help

    listed = [(name.removeprefix(prefix), entry.summary) for name, entry in COMMANDS.items() if name.startswith(prefix)]
    options = () if prefix else (_VERSION,)
    text = (
        "Commands of one group."
        if prefix
        else "One object around your PyTorch training loop: from one CPU to a cluster."
    )
    print_help(f"{program} COMMAND [OPTIONS]", text, (*options, HELP), listed)

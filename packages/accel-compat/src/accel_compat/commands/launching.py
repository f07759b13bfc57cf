"""``accelerate launch`` as functions: parser, resolution of the settings, start of the processes."""

import argparse
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from accel_compat.commands.argument_parser import add_settings, given_settings, parser_of
from accel_compat.commands.command_line import existing_default
from accel_launch.cli.options import config_from
from accel_launch.config.model import AccelConfig, settings
from accel_state.environment import parse_flag_from_env

_DESCRIPTION = (
    "Starts a script on the processes that the settings ask for. Every option may be written with hyphens, like "
    "--num-processes."
)


def launch_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """Returns the parser of ``accelerate launch``: the settings, then a script and its arguments."""
    parser = parser_of("launch", _DESCRIPTION, subparsers, launch_command)
    parser.add_argument("--config_file", metavar="PATH", help="Read settings from this YAML or JSON file.")
    add_settings(parser)
    parser.add_argument("training_script", help="The script, or with -m the module, to start.")
    parser.add_argument("training_script_args", nargs=argparse.REMAINDER, help="Arguments of the script.")
    return parser


def resolved(args: argparse.Namespace) -> tuple[AccelConfig, str | None]:
    """Settings of a launch: those that were given, then those of the environment, then those of the file; and the file.

    Raises:
        ConfigError: a ValueError; names the key, the file's line and what was expected.
        FileNotFoundError: the named file does not exist.
    """
    flags = given_settings(args)
    if flags.get("multi_gpu") and parse_flag_from_env("ACCELERATE_USE_CPU"):
        flags["multi_gpu"] = False
    named: str | None = args.config_file
    if named is not None and not Path(named).is_file():
        raise FileNotFoundError(f"The passed configuration file `{named}` does not exist.")
    file = existing_default(os.environ) if named is None else named
    return config_from(flags, file), file


def validate_launch_command(args: argparse.Namespace) -> tuple[argparse.Namespace, Any, bool]:
    """Completes parsed arguments by the settings of the environment and the file.

    Returns:
        The same arguments; the file's settings as an object, or None; whether a file or variable gives the precision.
    """
    from accel_compat.commands.config_files import load_config_from_file

    config, file = resolved(args)
    for name in settings():
        setattr(args, name, getattr(config, name))
    defaults = None if file is None else load_config_from_file(file)
    return args, defaults, config.origin("mixed_precision").source in ("env", "file")


def launch_command(args: argparse.Namespace) -> None:
    """Starts the script in processes whose ``import accelerate`` is accel, and waits for them.

    The launcher is a process of its own, because it replaces itself by a script that needs no supervision.

    Raises:
        SystemExit: a process failed; the status is that of ``accel launch``.
        ConfigError: a ValueError; the settings contain a mistake.
    """
    config, file = resolved(args)
    words = [] if file is None else ["--config_file", file]
    for name in given_settings(args):
        row = settings()[name]
        if row.is_switch:
            words.append(f"--{name}" if getattr(config, name) else f"--no_{name}")
        elif getattr(config, name) is not None:
            words += [f"--{name}", row.text(getattr(config, name))]
    command = [sys.executable, "-m", "accel", "launch", "--compat", *words]
    status = subprocess.run([*command, args.training_script, *args.training_script_args]).returncode
    if status:
        raise SystemExit(status)

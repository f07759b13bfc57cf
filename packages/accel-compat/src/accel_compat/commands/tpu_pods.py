"""``accelerate tpu-config`` as functions."""

import argparse
from typing import Any

from accel_compat.commands.argument_parser import parser_of, words_of
from accel_compat.commands.command_line import run_command

_OPTIONS = (
    "config_file",
    "tpu_name",
    "tpu_zone",
    "use_alpha",
    "command_file",
    "install_accelerate",
    "accelerate_version",
    "debug",
)


def tpu_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """Returns the parser of ``accelerate tpu-config``."""
    parser = parser_of("tpu-config", "Runs commands on all machines of a TPU pod.", subparsers, tpu_command_launcher)
    parser.add_argument("--config_file", metavar="PATH", help="File with the pod's name, zone and commands.")
    parser.add_argument("--tpu_name", help="Name of the pod.")
    parser.add_argument("--tpu_zone", help="Zone of the pod.")
    parser.add_argument("--use_alpha", action="store_true", help="Use gcloud's alpha commands.")
    parser.add_argument("--command_file", metavar="PATH", help="File with one command in each line.")
    parser.add_argument("--command", action="append", nargs="+", help="A command; may be given several times.")
    parser.add_argument("--install_accelerate", action="store_true", help="Install Accelerate there first.")
    parser.add_argument("--accelerate_version", default="latest", help="Which one: latest, dev, or a version.")
    parser.add_argument("--debug", action="store_true", help="Print gcloud's command line, and do not run it.")
    return parser


def tpu_command_launcher(args: argparse.Namespace) -> None:
    """Runs the commands on the pod, or prints gcloud's command line.

    Raises:
        SystemExit: no pod or no command is named, or gcloud failed.
    """
    commands = [word for group in args.command or () for word in ("--command", " ".join(group))]
    status = run_command(["tpu-config", *words_of(args, _OPTIONS), *commands])
    if status:
        raise SystemExit(status)

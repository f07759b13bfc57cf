"""``accelerate test``, ``env``, ``config`` and ``merge-weights`` as functions."""

import argparse
import os
import subprocess
import sys
from typing import Any

from accel_compat.commands.argument_parser import parser_of, words_of
from accel_compat.commands.command_line import run_command


def check_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """Returns the parser of ``accelerate test``."""
    parser = parser_of("test", "Checks collectives and training with the settings.", subparsers, check_command)
    parser.add_argument("--config_file", metavar="PATH", help="File of settings.")
    return parser


def check_command(args: argparse.Namespace) -> None:
    """Runs the check in processes of its own.

    Raises:
        SystemExit: it failed.
    """
    command = [sys.executable, "-m", "accel.compat", "-m", "accelerate.commands.test"]
    status = subprocess.run([*command, *words_of(args, ("config_file",))]).returncode
    if status:
        raise SystemExit(status)


def env_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """Returns the parser of ``accelerate env``."""
    parser = parser_of("env", "Versions, devices and settings.", subparsers, env_command)
    parser.add_argument("--config_file", metavar="PATH", help="File of settings.")
    return parser


def env_command(args: argparse.Namespace) -> None:
    """Prints versions, devices and settings."""
    _run("env", words_of(args, ("config_file",)))


def config_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """Returns the parser of ``accelerate config``."""
    parser = parser_of("config", "Asks for settings and writes a file.", subparsers, config_command)
    parser.add_argument("--config_file", metavar="PATH", help="The file to write.")
    return parser


def config_command(args: argparse.Namespace) -> None:
    """Asks for settings and writes them."""
    _run("config", words_of(args, ("config_file",)))


def default_command_parser(parser: Any = None, parents: Any = None) -> argparse.ArgumentParser:
    """Returns the parser of ``accelerate config default``."""
    made = parser_of("default", "Writes a file with default settings.", parser, default_command, parents=parents or ())
    made.add_argument("--config_file", metavar="PATH", help="The file to write.")
    made.add_argument("--mixed_precision", choices=["no", "fp16", "bf16"], default="no", help="Precision.")
    return made


def default_command(args: argparse.Namespace) -> None:
    """Writes a file with default settings, unless it exists."""
    from accel_compat.commands.config_files import write_basic_config

    path = write_basic_config(args.mixed_precision, args.config_file)
    if path:
        print(f"accelerate configuration saved at {path}")


def get_config_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """Returns the parser of ``accelerate config`` with its subcommands."""
    parser = config_command_parser(subparsers)
    kinds = parser.add_subparsers(title="subcommands", dest="subcommand")
    default_command_parser(kinds)
    update_command_parser(kinds)
    return parser


def update_command_parser(parser: Any = None, parents: Any = None) -> argparse.ArgumentParser:
    """Returns the parser of ``accelerate config update``."""
    text = "Writes a file of settings in today's names."
    made = parser_of("update", text, parser, update_command, parents=parents or ())
    made.add_argument("--config_file", metavar="PATH", help="The file; if left out, that of accelerate config.")
    return made


def update_command(args: argparse.Namespace) -> None:
    """Writes a file of settings in today's names, and prints its path."""
    print(f"accelerate configuration updated at {update_config(args)}")


def update_config(args: argparse.Namespace) -> str:
    """Writes a file of settings in today's names, beside a copy of the old one; returns its path.

    Raises:
        ValueError: the file does not exist.
    """
    from accel_compat.commands.config_files import default_config_file

    path = args.config_file or default_config_file
    if not os.path.isfile(path):
        raise ValueError(f"the file of settings {path} does not exist; nearest: accelerate config default writes one")
    _run("config", ["update", path])
    return str(path)


def merge_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """Returns the parser of ``accelerate merge-weights``."""
    parser = parser_of("merge-weights", "Writes shards of FSDP as one model.", subparsers, merge_command)
    parser.add_argument("checkpoint_directory", help="Folder of the shards.")
    parser.add_argument("output_path", help="Folder of the model.")
    parser.add_argument("--unsafe_serialization", action="store_true", help="Write torch's format.")
    parser.add_argument("--remove_checkpoint_dir", action="store_true", help="Remove the shards afterwards.")
    return parser


def merge_command(args: argparse.Namespace) -> None:
    """Merges the shards of a model."""
    from accel_compat.checkpoints.sharded import merge_fsdp_weights

    merge_fsdp_weights(
        args.checkpoint_directory, args.output_path, not args.unsafe_serialization, args.remove_checkpoint_dir
    )


def _run(name: str, words: list[str]) -> None:
    status = run_command([name, *words])
    if status:
        raise SystemExit(status)

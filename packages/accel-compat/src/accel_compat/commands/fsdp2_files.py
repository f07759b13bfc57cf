"""``accelerate to-fsdp2`` as functions: a file of settings of FSDP 1 becomes one of FSDP 2."""

import argparse
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accel_compat.absent import ConversionStatus as ConversionStatus
from accel_compat.commands.argument_parser import parser_of
from accel_launch.cli.to_fsdp2 import convert, read_settings, write_settings

LOG = logging.getLogger("accelerate.commands.to_fsdp2")
__all__ = [
    "ConversionStatus",
    "convert_config_to_fsdp2",
    "load_config",
    "main",
    "to_fsdp2_command",
    "to_fsdp2_command_parser",
]


def to_fsdp2_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """Returns the parser of ``accelerate to-fsdp2``."""
    parser = parser_of("to-fsdp2", "Converts a file of settings to FSDP 2.", subparsers, to_fsdp2_command)
    parser.add_argument("--config_file", required=True, metavar="PATH", help="The file to convert.")
    parser.add_argument("--overwrite", action="store_true", help="Write over the file, or over --output_file.")
    parser.add_argument("--output_file", metavar="PATH", help="Where to write the result.")
    return parser


def load_config(config_file: Any) -> dict[str, Any]:
    """Entries of a file of settings.

    Raises:
        FileNotFoundError: the file does not exist.
        ConfigError: a ValueError; the file is no mapping of settings.
    """
    path = Path(config_file)
    if not path.is_file():
        raise FileNotFoundError(f"Config file `{config_file}` not found")
    return read_settings(path)


def convert_config_to_fsdp2(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the entries with an ``fsdp_config`` of version 2; options that it does not have are left out."""
    if (config.get("fsdp_config") or {}).get("fsdp_version", 1) == 2:
        LOG.warning("Config already specifies FSDP2, skipping conversion...")
        return dict(config)
    converted, notes = convert(config)
    for note in notes:
        LOG.warning("%s", note)
    return converted


def to_fsdp2_command(args: argparse.Namespace) -> None:
    """Converts the file that the arguments name.

    Raises:
        FileNotFoundError: the file does not exist.
        FileExistsError: the output exists, and may not be overwritten.
        ValueError: there is no place to write to; the file is no mapping of settings; or the output cannot be written.
    """
    config = load_config(args.config_file)
    if args.output_file is None and not args.overwrite:
        raise ValueError("If --overwrite is not set, --output_file must be provided")
    target = Path(args.output_file or args.config_file)
    if target.exists() and not args.overwrite:
        raise FileExistsError(f"Output file `{target}` already exists and --overwrite is not set")
    write_settings(target, convert_config_to_fsdp2(config))


def main() -> int:
    """Runs ``accelerate to-fsdp2`` with the arguments of the process, and returns its exit status."""
    to_fsdp2_command(to_fsdp2_command_parser().parse_args())
    return 0

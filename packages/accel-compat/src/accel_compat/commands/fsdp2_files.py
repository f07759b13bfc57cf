"""``accelerate to-fsdp2`` as functions: a file of settings of FSDP 1 becomes one of FSDP 2."""

import argparse
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accel_compat.commands.argument_parser import parser_of
from accel_launch.cli.to_fsdp2 import convert
from accel_launch.config.model import settings

LOG = logging.getLogger("accelerate.commands.to_fsdp2")
__all__ = ["convert_config_to_fsdp2", "load_config", "main", "to_fsdp2_command", "to_fsdp2_command_parser"]


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
    """
    import yaml

    path = Path(config_file)
    if not path.is_file():
        raise FileNotFoundError(f"Config file `{config_file}` not found")
    return dict(yaml.safe_load(path.read_text(encoding="utf-8")) or {})


def convert_config_to_fsdp2(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the entries with an ``fsdp_config`` of version 2; options that it does not have are left out."""
    if (config.get("fsdp_config") or {}).get("fsdp_version", 1) == 2:
        LOG.warning("Config already specifies FSDP2, skipping conversion...")
        return dict(config)
    section = config.get("fsdp_config") or {}
    others = {key: value for key, value in section.items() if not (str(key).startswith("fsdp_") or _is_option(key))}
    options = {key: value for key, value in section.items() if key not in others}
    converted, notes = convert({**config, "fsdp_config": options})
    for note in notes:
        LOG.warning("%s", note)
    made = converted["fsdp_config"]
    return {**converted, "fsdp_config": {**made, **others} if isinstance(made, dict) else made}


def _is_option(key: object) -> bool:
    return f"fsdp_{key}" in settings()


def to_fsdp2_command(args: argparse.Namespace) -> None:
    """Converts the file that the arguments name.

    Raises:
        FileNotFoundError: the file does not exist.
        FileExistsError: the output exists, and may not be overwritten.
        ValueError: there is no place to write to.
    """
    import yaml

    config = load_config(args.config_file)
    if args.output_file is None and not args.overwrite:
        raise ValueError("If --overwrite is not set, --output_file must be provided")
    target = Path(args.output_file or args.config_file)
    if target.exists() and not args.overwrite:
        raise FileExistsError(f"Output file `{target}` already exists and --overwrite is not set")
    target.write_text(yaml.safe_dump(convert_config_to_fsdp2(config)), encoding="utf-8")


def main() -> int:
    """Runs ``accelerate to-fsdp2`` with the arguments of the process, and returns its exit status."""
    to_fsdp2_command(to_fsdp2_command_parser().parse_args())
    return 0

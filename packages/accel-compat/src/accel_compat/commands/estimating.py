"""``accelerate estimate-memory`` as functions: parser, memory of a model by dtype, printed table."""

import argparse
from typing import Any

from accel.cli.estimate import DEFAULTS
from accel_compat.commands.argument_parser import parser_of, words_of
from accel_compat.commands.command_line import run_command
from accel_planner.profile.model_sizes import BITS, estimated


def estimate_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """Returns the parser of ``accelerate estimate-memory``."""
    parser = parser_of("estimate-memory", "Memory of a model by dtype.", subparsers, estimate_command)
    parser.add_argument("model_name", help="Name of a model of the hub, or its folder.")
    parser.add_argument("--library_name", choices=["timm", "transformers"], help="Library that builds the model.")
    parser.add_argument("--dtypes", nargs="+", default=list(DEFAULTS), choices=list(BITS), help="Dtypes of the table.")
    parser.add_argument("--trust_remote_code", action="store_true", help="Let a model bring its own code.")
    return parser


def verify_on_hub(repo: str, token: str | None = None) -> Any:
    """Facts of a model of the hub; False if there is no such model, and "gated" if it cannot be read."""
    from huggingface_hub import model_info
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    try:
        return model_info(repo, token=token)
    except GatedRepoError:
        return "gated"
    except (OSError, RepositoryNotFoundError):
        return False


def check_has_model(error: Exception) -> str:
    """Library whose message this error has: "timm", "transformers" or "unknown"."""
    text = str(error.args[0]) if error.args else ""
    if isinstance(error, RuntimeError) and "Unknown model" in text:
        return "timm"
    if isinstance(error, OSError) and "does not appear to have a file named" in text:
        return "transformers"
    return "unknown"


def create_empty_model(
    model_name: str, library_name: str | None = None, trust_remote_code: bool = False, access_token: str | None = None
) -> Any:
    """Returns a model of transformers on the meta device.

    Raises:
        ValueError: the library is another one.
        OSError: no model has this name, or the hub cannot be reached.
    """
    import torch
    from transformers import AutoConfig, AutoModel

    if library_name not in (None, "transformers"):
        raise ValueError(f"`library_name` is {library_name!r}; models of transformers can be built")
    config = AutoConfig.from_pretrained(model_name, trust_remote_code=trust_remote_code, token=access_token)
    with torch.device("meta"):
        return AutoModel.from_config(config, trust_remote_code=trust_remote_code)


def gather_data(args: argparse.Namespace) -> list[list[Any]]:
    """One row for each dtype: its name, bytes of the largest layer, bytes of the model, bytes of training by part."""
    model = create_empty_model(args.model_name, args.library_name, args.trust_remote_code)
    sizes = {name: (one.numel(), one.is_floating_point()) for name, one in model.state_dict().items()}
    rows = estimated(sizes, args.dtypes)
    return [[row["dtype"], row["largest_layer"], row["total"], row["training"]] for row in rows]


def estimate_command(args: argparse.Namespace) -> None:
    """Prints the table of a model.

    Raises:
        OSError: no model has this name, or the hub cannot be reached.
        SystemExit: the model cannot be built.
    """
    words = words_of(args, ("library_name", "trust_remote_code", "dtypes"))
    status = run_command(["estimate-memory", args.model_name, *words])
    if status:
        raise SystemExit(status)

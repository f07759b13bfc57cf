"""``accel estimate-memory``: memory for loading a model, and for training it in one dtype."""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import rich_click as click

from accel_launch.cli.options import as_json
from accel_launch.cli.printing import print_json, print_table
from accel_planner.profile.model_sizes import BITS, estimated
from accel_state.errors import ConfigError
from accel_state.sizes import readable_bytes

if TYPE_CHECKING:
    from accel_inference.placement.inference_memory import InferenceOptions

_SHORT = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
DEFAULTS = ("float32", "float16", "int8", "int4")


@click.command("estimate-memory")
@click.argument("words", nargs=-1, required=True, metavar="MODEL")
@click.option(
    "--dtypes", multiple=True, metavar="NAMES", help=f"Any of {', '.join(BITS)}. Default: {' '.join(DEFAULTS)}."
)
@click.option("--library_name", metavar="NAME", help="timm or transformers; for a folder with a configuration only.")
@click.option("--trust_remote_code", is_flag=True, help="Let a configuration bring its own code.")
@click.option(
    "--batch_size", type=click.IntRange(1), metavar="N", help="Inference: sequences in the KV cache. Default: 1."
)
@click.option("--length", type=click.IntRange(1), metavar="N", help="Inference: tokens of a sequence, prompt included.")
@click.option(
    "--max_memory", multiple=True, metavar="BUDGETS", help="Inference: propose a device map for, say, 0=10GB,cpu=30GB."
)
@as_json
def estimate_memory(
    words: tuple[str, ...],
    *,
    dtypes: tuple[str, ...],
    library_name: str | None,
    trust_remote_code: bool,
    batch_size: int | None,
    length: int | None,
    max_memory: tuple[str, ...],
    as_json: bool,
) -> int:
    """Memory of MODEL by dtype. MODEL is a module:build, a folder of safetensors or with a config.json, or one file.

    Training is with Adam: weights, gradients and two states, all in that dtype. For a real plan with activations,
    precision and devices, use accel plan. --length and --max-memory add a table for inference.
    """
    from accel_planner.profile.model_sizes import described_module, sizes_of

    model, chosen = _model_and_dtypes(words, dtypes)
    title, sizes = sizes_of(model, library_name, trust_remote_code)
    rows = estimated(sizes, chosen)
    if batch_size is not None and length is None:
        raise ConfigError("--batch-size is for the KV cache, which needs --length too: the tokens of a sequence")
    budgets = parse_max_memory(max_memory)
    options, inference = None, None
    if length or budgets:
        from accel_inference.placement.inference_memory import InferenceOptions, estimate_inference

        options = InferenceOptions(batch_size or 1, length or 0, budgets)
        inference = estimate_inference(described_module(model, trust_remote_code), title, chosen, options)
    if as_json:
        print_json({"model": title, "rows": rows} | ({"inference": inference} if inference else {}))
        return 0
    print(f"Memory usage for loading {title}")
    print_table(
        ["dtype", "Largest layer>", "Total size>", "Training using Adam>"],
        [
            (
                row["dtype"],
                readable_bytes(row["largest_layer"]),
                readable_bytes(row["total"]),
                "N/A" if row["training"] is None else readable_bytes(row["training"]["step"]),
            )
            for row in rows
        ],
    )
    if options and inference:
        print_inference(inference, options)
    return 0


def _model_and_dtypes(words: Iterable[str], dtypes: Iterable[str]) -> tuple[str, list[str]]:
    """Splits the model from the dtypes: several dtypes may follow one ``--dtypes``, as in other estimators."""
    named = [_SHORT.get(word, word) for text in dtypes for word in text.replace(",", " ").split()]
    models: list[str] = []
    for given in words:
        word = _SHORT.get(given, given) if named else given
        (named if word in BITS and named else models).append(word)
    unknown = [name for name in named if name not in BITS]
    if unknown:
        raise ConfigError(f"no dtype {unknown[0]!r}; known: {', '.join(BITS)}")
    if len(models) != 1:
        raise ConfigError(f"expected one model, and got {', '.join(models) or 'none'}")
    return models[0], list(dict.fromkeys(named)) or list(DEFAULTS)


def parse_max_memory(words: Iterable[str]) -> dict[int | str, int | str] | None:
    """Budgets from words like ``0=10GB,cpu=30GB``; None without any."""
    budgets: dict[int | str, int | str] = {}
    for word in (word for text in words for word in text.replace(",", " ").split()):
        device, equals, size = word.partition("=")
        if not (equals and device and size):
            raise ConfigError(f"--max-memory {word!r} is not understood; expected device=size, such as 0=10GB,cpu=30GB")
        budgets[int(device) if device.isdecimal() else device] = size
    return budgets or None


def print_inference(rows: Iterable[Mapping[str, Any]], options: "InferenceOptions") -> None:
    """Prints the rows, and below them what each device holds."""
    rows = list(rows)
    batch = f" of {options.batch_size} x {options.length} tokens" if options.length else ""
    print(f"\nMemory usage for inference{batch}")
    columns = ("weights", "kv_cache", "total")
    print_table(
        ["dtype", "Weights>", "KV cache>", "Total>"],
        [(row["dtype"], *(readable_bytes(row[column]) for column in columns)) for row in rows],
    )
    placed = [(row, device, held) for row in rows for device, held in row.get("devices", {}).items()]
    if not placed:
        return
    print("\nDevice map (the modules are in --json)")
    print_table(
        ["dtype", "Device", "Weights>", "KV cache>", "Budget>"],
        [
            (
                row["dtype"],
                device,
                *(readable_bytes(held[column]) for column in ("weights", "kv_cache")),
                "N/A" if held["budget"] is None or device == "disk" else readable_bytes(held["budget"]),
            )
            for row, device, held in placed
        ],
    )
    for row in rows:
        if not row["fits"]:
            print(f"{row['dtype']}: needs more than a device has; reduce the batch size or the length")

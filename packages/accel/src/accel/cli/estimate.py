"""``accel estimate-memory``: memory for loading a model, and for training it in one dtype."""

import json
import struct
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import rich_click as click

from accel.cli.inference_memory import (
    InferenceOptions,
    estimate_inference,
    parse_max_memory,
    print_inference,
    transformers_model,
)
from accel_launch.cli.options import as_json
from accel_launch.cli.printing import print_json, print_table
from accel_state.errors import ConfigError
from accel_state.sizes import readable_bytes

_SHORT = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
BITS: Mapping[str, int] = {"float32": 32, "float16": 16, "bfloat16": 16, "int8": 8, "int4": 4}
DEFAULTS = ("float32", "float16", "int8", "int4")
_TRAINED = ("float32", "float16", "bfloat16")
Sizes = Mapping[str, tuple[int, bool]]
"""For each tensor by name: number of elements, and whether it is floating-point."""


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
    model, chosen = _model_and_dtypes(words, dtypes)
    title, sizes = _sizes_of(model, library_name, trust_remote_code)
    rows = estimate(sizes, chosen)
    if batch_size is not None and length is None:
        raise ConfigError("--batch-size is for the KV cache, which needs --length too: the tokens of a sequence")
    budgets = parse_max_memory(max_memory)
    options = InferenceOptions(batch_size or 1, length or 0, budgets) if length or budgets else None
    inference = estimate_inference(_module(model, trust_remote_code), title, chosen, options) if options else None
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


def estimate(sizes: Sizes, dtypes: Iterable[str]) -> list[dict[str, Any]]:
    """One row for each dtype: bytes of the largest layer, of the model, and of training it; pure.

    A layer is an entry of a list (a name with one number), or otherwise a module.
    """
    layers: dict[str, int] = {}
    for name, (numel, _) in sizes.items():
        layers[_layer(name)] = layers.get(_layer(name), 0) + numel
    total, largest = sum(numel for numel, _ in sizes.values()), max(layers.values(), default=0)
    rows: list[dict[str, Any]] = []
    for dtype in dtypes:
        size = total * BITS[dtype] // 8
        training = None
        if dtype in _TRAINED:
            training = {"model": size, "gradients": size, "optimizer": 2 * size, "step": 4 * size}
        rows.append({"dtype": dtype, "largest_layer": largest * BITS[dtype] // 8, "total": size, "training": training})
    return rows


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


def _sizes_of(model: str, library: str | None, trust: bool) -> tuple[str, Sizes]:
    path = Path(model)
    if path.is_file() and path.suffix == ".safetensors":
        return path.name, _header(path)
    if path.is_dir():
        files = sorted(path.glob("*.safetensors"))
        if files:
            return path.name, {name: size for file in files for name, size in _header(file).items()}
        if (path / "config.json").is_file():
            return path.name, _from_config(path, library, trust)
        raise ConfigError(f"{model} holds neither *.safetensors nor a config.json")
    if ":" in model:
        from accel.cli.model_loading import load_object
        from accel_planner.profile.models import build

        return model, _sizes_of_module(build(load_object(model, "the model")).model)
    raise ConfigError(
        f"{model!r} is no folder, no .safetensors file and no module:build. Models of a hub are not downloaded here: "
        "download it first and name its folder"
    )


def _module(model: str, trust: bool) -> Any:
    """The model itself, on the meta device if it can be built there."""
    path = Path(model)
    folder = path.parent if path.is_file() else path
    if (folder / "config.json").is_file():
        return transformers_model(folder, trust)
    if path.exists():
        raise ConfigError(f"{folder} has no config.json; --length and --max-memory need one, or a module:build")
    from accel.cli.model_loading import load_object
    from accel_planner.profile.models import build

    return build(load_object(model, "the model")).model


def _sizes_of_module(module: Any) -> Sizes:
    from accel_backends.ops.fqn import named_parameters

    found = {name: (p.numel(), p.is_floating_point()) for name, p in named_parameters(module).items()}
    state = module.state_dict()
    return found | {name: (b.numel(), b.is_floating_point()) for name, b in module.named_buffers() if name in state}


def _header(path: Path) -> Sizes:
    """Names and sizes of a file's tensors, read from its header only.

    Raises:
        ConfigError: the header is damaged.
    """
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length))
        entries: Iterator[tuple[str, Any]] = ((name, e) for name, e in header.items() if name != "__metadata__")
        return {name: (_product(entry["shape"]), entry["dtype"][0] in "FB") for name, entry in entries}
    except (OSError, ValueError, KeyError, struct.error, MemoryError) as error:
        raise ConfigError(f"{path} cannot be read as safetensors: {error}") from error


def _product(shape: Iterable[int]) -> int:
    count = 1
    for size in shape:
        count *= int(size)
    return count


def _from_config(path: Path, library: str | None, trust: bool) -> Sizes:
    """Sizes of the model of a transformers configuration, built on the meta device."""
    if library not in (None, "transformers"):
        raise ConfigError(f"library_name {library!r} is not supported for {path}; expected transformers")
    try:
        import torch
        from transformers import AutoConfig, AutoModel
    except ImportError as error:
        raise ConfigError(
            f"{path} has a configuration and no weights, and building its model needs transformers: {error}"
        ) from error
    try:
        with torch.device("meta"):
            model = AutoModel.from_config(
                AutoConfig.from_pretrained(str(path), trust_remote_code=trust), trust_remote_code=trust
            )
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: transformers cannot build the model: {error}") from error
    return _sizes_of_module(model)


def _layer(name: str) -> str:
    parts = name.split(".")
    place = next((at for at, part in enumerate(parts) if part.isdecimal()), None)
    return ".".join(parts[: place + 1] if place is not None else parts[:-1])

"""Sizes of a model's tensors by name, read from its files or its configuration without loading values."""

import json
import struct
from collections.abc import Iterable, Iterator, Mapping
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel_planner.profile.named_objects import load_object
from accel_state.errors import ConfigError

if TYPE_CHECKING:
    from torch import nn

Sizes = Mapping[str, tuple[int, bool]]
"""For each tensor by name: number of elements, and whether it is floating-point."""
BITS: Mapping[str, int] = {"float32": 32, "float16": 16, "bfloat16": 16, "int8": 8, "int4": 4}
"""Dtypes of ``estimated``, and bits of an element in each."""
_OF_A_CHECKPOINT = ("manifest.json", "tree.json")
"""Files of every checkpoint of ``save_state``."""
_TRAINED = ("float32", "float16", "bfloat16")


def sizes_of(model: str, library: str | None, trust: bool) -> tuple[str, Sizes]:
    """Title and sizes of ``model``: a safetensors file, a folder of them or with a ``config.json``, or a module:build.

    Raises:
        ConfigError: ``model`` is none of these, or cannot be read or built.
    """
    path = Path(model)
    if path.is_file() and path.suffix == ".safetensors":
        return path.name, _header(path)
    if path.is_dir():
        files = _weight_files(path)
        if files:
            return path.name, {name: size for file in files for name, size in _header(file).items()}
        if (path / "config.json").is_file():
            return path.name, _from_config(path, library, trust)
        raise ConfigError(f"{model} holds neither *.safetensors nor a config.json")
    if ":" in model:
        from accel_planner.profile.models import build

        return model, _module_sizes(build(load_object(model, "the model")).model)
    raise ConfigError(
        f"{model!r} is no folder, no .safetensors file and no module:build. Models of a hub are not downloaded here: "
        "download it first and name its folder"
    )


def estimated(sizes: Sizes, dtypes: Iterable[str]) -> list[dict[str, Any]]:
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


def described_module(model: str, trust: bool) -> Any:
    """The model itself, on the meta device if it can be built there.

    Raises:
        ConfigError: ``model`` has neither a configuration nor a function that builds it.
    """
    path = Path(model)
    folder = path.parent if path.is_file() else path
    if (folder / "config.json").is_file():
        return transformers_model(folder, trust)
    if path.exists():
        raise ConfigError(f"{folder} has no config.json; --length and --max-memory need one, or a module:build")
    from accel_planner.profile.models import build

    return build(load_object(model, "the model")).model


def _weight_files(folder: Path) -> list[Path]:
    """The files of a model's weights: those of an index, ``model.safetensors`` alone, or all of the folder.

    Folders of the Hub may hold the weights once more in another file, like ``consolidated.safetensors``.

    Raises:
        ConfigError: a file of the index is missing or the index is damaged, or the folder is a run's checkpoint, whose
            files have the optimizer's tensors as well.
    """
    if all((folder / name).is_file() for name in _OF_A_CHECKPOINT):
        raise ConfigError(
            f"{folder} is the checkpoint of a run, which holds more than the model; write the model alone by accel "
            f"merge-weights {folder} OUT, and name OUT"
        )
    alone, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if alone.is_file():
        return [alone]
    if not index.is_file():
        return sorted(folder.glob("*.safetensors"))
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{index} cannot be read as an index of safetensors files: {error!r}") from error
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise ConfigError(f"{folder} lacks {len(missing)} of the {len(names)} files of its index: {', '.join(missing)}")
    return [folder / name for name in names]


def _module_sizes(module: Any) -> Sizes:
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
        return {name: (prod(map(int, entry["shape"])), entry["dtype"][0] in "FB") for name, entry in entries}
    except (OSError, ValueError, KeyError, struct.error, MemoryError) as error:
        raise ConfigError(f"{path} cannot be read as safetensors: {error}") from error


def _from_config(path: Path, library: str | None, trust: bool) -> Sizes:
    """Sizes of the model of a transformers configuration, built on the meta device."""
    if library not in (None, "transformers"):
        raise ConfigError(f"library_name {library!r} is not supported for {path}; expected transformers")
    return _module_sizes(transformers_model(path, trust, head=False))


def transformers_model(path: Path, trust: bool, *, head: bool = True) -> "nn.Module":
    """Builds the model of a folder's configuration on the meta device, with its head if the configuration names one.

    ``head=False`` builds the base model.

    Raises:
        ConfigError: transformers is missing, or cannot build it.
    """
    try:
        import torch
        import transformers
    except ImportError as error:
        raise ConfigError(f"the model of {path} is built by transformers, which cannot be imported: {error}") from error
    try:
        config = transformers.AutoConfig.from_pretrained(str(path), trust_remote_code=trust)
        named = getattr(transformers, next(iter(config.architectures or ()), ""), None) if head else None
        with torch.device("meta"):
            if named is not None:
                model: nn.Module = named(config)
            else:
                model = transformers.AutoModel.from_config(config, trust_remote_code=trust)
            return model
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: transformers cannot build the model: {error}") from error


def _layer(name: str) -> str:
    parts = name.split(".")
    place = next((at for at, part in enumerate(parts) if part.isdecimal()), None)
    return ".".join(parts[: place + 1] if place is not None else parts[:-1])

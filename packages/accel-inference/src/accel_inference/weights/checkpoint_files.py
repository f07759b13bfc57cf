"""Checkpoints of a model: safetensors or torch's zip format, one file or several with an index; or of a run."""

import json
import os
import pickle
from collections.abc import Iterator, Mapping
from logging import getLogger
from pathlib import Path

import torch
from torch import Tensor

from accel_inference.module_tensors.ties import device_of
from accel_inference.weights.run_checkpoints import is_run_checkpoint, weights_of_run
from accel_inference.weights.safetensors_header import read_header
from accel_inference.weights.sources import HostWeight, Source, Weight
from accel_state.errors import CheckpointCorruptError, CheckpointError

_WHOLE = ("model.safetensors", "pytorch_model.bin")
_FORMATS = ("pt", "tf", "flax", "mlx")
PathLike = str | os.PathLike[str]


def checkpoint_weights(checkpoint: PathLike) -> dict[str, Weight]:
    """Weights of a checkpoint by name: of files (see ``checkpoint_files``), or of a folder that save_state wrote.

    Raises:
        ValueError: there is no such checkpoint, or the folder has several.
        CheckpointError: a file is corrupt, or would run code when it is read.
    """
    if is_run_checkpoint(Path(checkpoint)):
        return {**weights_of_run(Path(checkpoint))}
    return {name: source for file in checkpoint_files(checkpoint) for name, source in weights_of(file).items()}


def checkpoint_files(checkpoint: PathLike) -> list[Path]:
    """The files of a checkpoint: of a file itself, of an index, or of the file or single index that a folder has.

    Raises:
        ValueError: there is no such checkpoint, or the folder has several.
        CheckpointCorruptError: an index is malformed, or a file that it names is missing.
    """
    place = Path(checkpoint)
    if place.is_dir():
        place = _in_folder(place)
    if not place.is_file():
        raise ValueError(
            "`checkpoint` should be the path to a file containing a whole state dict, or the index of a sharded "
            f"checkpoint, or a folder containing one of them, but got {checkpoint}, which is none"
        )
    return _indexed(place) if place.name.endswith(".json") else [place]


def _in_folder(folder: Path) -> Path:
    found = next((folder / name for name in _WHOLE if (folder / name).is_file()), None)
    indices = sorted(folder.glob("*.index.json"))
    if found is not None:
        return found
    if len(indices) == 1:
        return indices[0]
    if len(indices) > 1:
        names = ", ".join(index.name for index in indices)
        raise ValueError(f"{folder} containing more than one `.index.json` file ({names}); pass one of them")
    files = ", ".join(sorted(path.name for path in folder.iterdir())[:8]) or "no files"
    raise ValueError(
        f"{folder} is not a folder containing a `.index.json` file or a {' or a '.join(_WHOLE)} file; it has {files}"
    )


def _indexed(index: Path) -> list[Path]:
    try:
        content = json.loads(index.read_text())
        names = content.get("weight_map", content).values()
        files = [index.parent / str(name) for name in dict.fromkeys(names)]
    except (ValueError, AttributeError) as error:
        raise CheckpointCorruptError(f"{index} is no index of a checkpoint: {error}") from error
    if missing := [file.name for file in files if not file.is_file()]:
        raise CheckpointCorruptError(f"{index} names files that are missing: {', '.join(missing)}")
    return sorted(files)


def weights_of(file: Path) -> dict[str, Source]:
    """Weights of one file by name; those of a safetensors file are read later, those of torch's are mapped.

    Raises:
        CheckpointCorruptError: the file is cut or is no such file.
        CheckpointError: the file would run code when it is read.
    """
    if file.suffix == ".safetensors":
        found, metadata = read_header(file)
        _check_metadata(file, metadata)
        aliases = {name: found[first] for name, first in metadata.items() if first in found and name not in found}
        return {**found, **aliases}
    return {name: HostWeight(tensor) for name, tensor in _read_torch(file)}


def _check_metadata(file: Path, metadata: Mapping[str, str]) -> None:
    format_ = metadata.get("format")
    if format_ is None:
        getLogger(__name__).debug("%s does not say in its metadata which framework wrote it", file)
    elif format_ not in _FORMATS:
        raise CheckpointError(f"{file} has the format {format_!r}; known are {', '.join(_FORMATS)}")
    elif format_ != "pt":
        raise ValueError(f"The checkpoint passed was saved with {format_}, we need a the pt format: {file}")


def _read_torch(file: Path) -> Iterator[tuple[str, Tensor]]:
    try:
        content = torch.load(file, map_location="cpu", weights_only=True, mmap=_is_zip(file))
    except pickle.UnpicklingError as error:
        raise CheckpointError(f"{file} has more than weights and would run code when it is read: {error}") from error
    except (RuntimeError, EOFError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise CheckpointCorruptError(f"{file} cannot be read as a checkpoint of torch: {error}") from error
    if not isinstance(content, Mapping):
        raise CheckpointCorruptError(f"{file} has a {type(content).__name__} and no state dict")
    state = content.get("state_dict", content) if not any(map(torch.is_tensor, content.values())) else content
    yield from ((name, tensor) for name, tensor in state.items() if isinstance(tensor, Tensor))


def _is_zip(file: Path) -> bool:
    with file.open("rb") as opened:
        return opened.read(2) == b"PK"


def load_state_dict(
    checkpoint_file: PathLike, device_map: Mapping[str, int | str | torch.device] | None = None
) -> dict[str, Tensor]:
    """Reads one checkpoint file, each weight to its device of the map; "disk" weights to the CPU.

    Raises:
        CheckpointError: the file cannot be read, or would run code when it is read.
    """
    loaded = {}
    for name, source in weights_of(Path(checkpoint_file)).items():
        device = device_of(name, device_map) if device_map else None
        tensor = source.read()
        loaded[name] = tensor if device in (None, "cpu", "disk") else tensor.to(device)
    return loaded

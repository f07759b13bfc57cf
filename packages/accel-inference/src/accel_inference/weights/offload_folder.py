"""Offload folders: a file for each weight, and an index of them.

The layout is Accelerate's: ``index.json`` has for each weight its dtype and shape, and the file ``<name>.dat`` its
bytes; or the safetensors file that holds it, and its name and dtype there.
"""

import json
import os
import secrets
from collections.abc import Hashable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from accel_inference.module_tensors.access import set_module_tensor_to_device
from accel_inference.module_tensors.dtypes import proper_dtype
from accel_inference.weights.safetensors_header import read_header
from accel_inference.weights.sources import FileWeight, HostWeight, WeightFile
from accel_state.errors import CheckpointCorruptError, CheckpointError, CheckpointMismatchError
from accel_state.pytree.composite import is_composite

Entry = Mapping[str, Any]
Folder = str | os.PathLike[str]
INDEX = "index.json"
_PART = 2**24
"""Bytes that are compared at a time."""


def offload_weight(
    weight: Tensor, weight_name: str, offload_folder: Folder, index: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Writes a weight into an offload folder, adds it to ``index`` and returns that.

    A file that has the weight's bytes already stays: models and processes with the same weights share a folder.

    Raises:
        CheckpointMismatchError: the folder has a weight of this name with other bytes.
        CheckpointError: the file cannot be written: the folder is missing or its disk full.
        ValueError: the weight consists of several tensors, as quantized ones of torchao do.
    """
    if is_composite(weight):
        raise ValueError(
            f"{weight_name} is a {type(weight).__name__}, which consists of several tensors, and a file of an offload "
            "folder holds one. Keep its module on a device of the map, or use cpu_offload"
        )
    index = {} if index is None else index
    target = Path(offload_folder) / f"{weight_name}.dat"
    host = weight.detach().cpu().contiguous()
    content = host.reshape(-1).view(torch.uint8) if host.numel() else torch.empty(0, dtype=torch.uint8)
    staging = _staging(target)
    try:
        if not _holds(target, content):
            with staging.open("wb") as file:
                file.write(content.numpy().data)
            if not _link(staging, target) and not _holds(target, content):
                staging.replace(target)
    except OSError as error:
        size = weight.numel() * weight.element_size()
        raise CheckpointError(f"cannot offload {weight_name} ({size} bytes) to {offload_folder}: {error}") from error
    finally:
        staging.unlink(missing_ok=True)
    index[weight_name] = {"dtype": str(weight.dtype).removeprefix("torch."), "shape": list(weight.shape)}
    return index


def _holds(target: Path, content: Tensor) -> bool:
    """Whether a file exists, with these bytes.

    Raises:
        CheckpointMismatchError: it exists with others.
    """
    try:
        with target.open("rb") as file:
            same = os.fstat(file.fileno()).st_size == content.numel() and all(
                torch.equal(part, torch.frombuffer(bytearray(file.read(len(part))), dtype=torch.uint8))
                for part in content.split(_PART)
                if len(part)
            )
    except FileNotFoundError:
        return False
    if not same:
        raise CheckpointMismatchError(
            f"{target} has other bytes than this model's {target.name.removesuffix('.dat')}, probably those of another "
            f"model that may be in use. Give each model an offload folder of its own, or delete {target.parent} first"
        )
    return True


def save_offload_index(index: Mapping[str, Any], offload_folder: Folder) -> None:
    """Adds entries to the index of a folder; entries of other weights stay.

    Raises:
        CheckpointError: the index cannot be written: the folder is missing or its disk full.
    """
    if not index:
        return
    target = Path(offload_folder) / INDEX
    content = json.dumps({**read_offload_index(offload_folder), **index}, indent=2)
    staging = _staging(target)
    try:
        staging.write_text(content)
        staging.replace(target)
    except OSError as error:
        raise CheckpointError(f"cannot write the index of {offload_folder}: {error}") from error
    finally:
        staging.unlink(missing_ok=True)


def read_offload_index(offload_folder: Folder) -> dict[str, Any]:
    """Entries of a folder's index; none if there is no index."""
    target = Path(offload_folder) / INDEX
    if not target.is_file():
        return {}
    try:
        found = json.loads(target.read_text())
    except ValueError as error:
        raise CheckpointCorruptError(f"{target} is no index of an offload folder: {error}") from error
    if not isinstance(found, dict) or not all(isinstance(entry, dict) for entry in found.values()):
        raise CheckpointCorruptError(f"{target} is no index of an offload folder: it has no object of objects")
    return found


def offload_state_dict(save_dir: Folder, state_dict: Mapping[str, Tensor]) -> dict[str, Any]:
    """Writes all weights of a state dict into an offload folder, which is made; names of one tensor share a file.

    Returns their entries of the folder's index.

    Raises:
        CheckpointMismatchError: the folder has a weight of one of the names with other bytes.
        CheckpointError: a file cannot be written.
    """
    Path(save_dir).mkdir(parents=True, exist_ok=True)
    index: dict[str, Any] = {}
    written: dict[Hashable, str] = {}
    for name, weight in state_dict.items():
        key = HostWeight(weight).key
        files = Path(save_dir) / f"{written.get(key)}.dat", Path(save_dir) / f"{name}.dat"
        if weight.device.type == "cpu" and key in written and _link(*files):
            index[name] = index[written[key]]
            continue
        offload_weight(weight, name, save_dir, index)
        written[key] = name
    save_offload_index(index, save_dir)
    return index


def _staging(target: Path) -> Path:
    """Path of a file that becomes ``target``, of no other process that writes into the folder at the same time."""
    return target.with_name(f"{target.name}.{secrets.token_hex(4)}.tmp")


def _link(source: Path, target: Path) -> bool:
    """Gives a file a second name; False if a file has that name, or without hard links."""
    try:
        target.hardlink_to(source)
    except OSError:
        return False
    return True


def indexed_weight(
    name: str, entry: Entry, folder: Folder | None, headers: dict[str, dict[str, FileWeight]]
) -> FileWeight:
    """The weight of an entry of an index; ``headers`` keeps those of safetensors files that were parsed before.

    Raises:
        CheckpointError: the file of the weight is missing, or lacks it.
        CheckpointCorruptError: the file has another size than its weight.
    """
    if entry.get("safetensors_file") is not None:
        return _in_safetensors(name, entry, headers)
    if folder is None:
        raise CheckpointError(f"{name} is offloaded to a file, and no folder is given")
    path = Path(folder) / f"{name}.dat"
    try:
        dtype, shape = proper_dtype(entry["dtype"]), tuple(int(length) for length in entry["shape"])
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointCorruptError(
            f"the index of {folder} has an entry of {name} that cannot be read: {entry}"
        ) from error
    try:
        weight = FileWeight(WeightFile.at(path), 0, shape, dtype, dtype, is_offloaded=True)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}, which has the weight {name}, does not exist") from error
    if weight.file.size != weight.nbytes:
        raise CheckpointCorruptError(f"{path} has {weight.file.size} bytes, and {name} has {weight.nbytes}")
    return weight


def _in_safetensors(name: str, entry: Entry, headers: dict[str, dict[str, FileWeight]]) -> FileWeight:
    path = str(entry["safetensors_file"])
    stored_name = str(entry.get("weight_name", name))
    try:
        if path not in headers:
            headers[path] = read_header(path)[0]
        found = headers[path][stored_name]
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}, which has the weight {name}, does not exist") from error
    except KeyError as error:
        raise CheckpointError(f"{path} has no weight {stored_name}") from error
    dtype = proper_dtype(entry["dtype"]) if entry.get("dtype") else found.stored
    return replace(found, dtype=dtype)


def load_offloaded_weight(weight_file: Folder, weight_info: Entry) -> Tensor:
    """Reads one file of an offload folder by its entry of the index."""
    path = Path(weight_file)
    return indexed_weight(path.name.removesuffix(".dat"), weight_info, path.parent, {}).read()


def load_offloaded_weights(model: nn.Module, index: Mapping[str, Entry] | None, offload_folder: Folder) -> None:
    """Loads weights of an offload folder into a model, onto the CPU."""
    headers: dict[str, dict[str, FileWeight]] = {}
    for name, entry in (index or {}).items():
        value = indexed_weight(name, entry, offload_folder, headers).read()
        set_module_tensor_to_device(model, name, "cpu", value=value, dtype=value.dtype)

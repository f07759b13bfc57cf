"""Headers of safetensors files: names, dtypes, shapes and byte ranges of their tensors.

https://huggingface.co/docs/safetensors/index#format
"""

import json
import os
from collections.abc import Mapping
from math import prod
from typing import Any

import torch

from accel_inference.weights.sources import FileWeight, WeightFile
from accel_state.errors import CheckpointCorruptError

_CODES: Mapping[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F64": torch.float64,
    "C64": torch.complex64,
}
_LENGTH = 8
_MAX_HEADER = 100_000_000


def read_header(path: str | os.PathLike[str]) -> tuple[dict[str, FileWeight], dict[str, str]]:
    """Tensors of a safetensors file by name, and its metadata; no weight is read.

    Raises:
        CheckpointCorruptError: the file is cut, or its header does not describe it.
    """
    file = WeightFile.at(path)
    header = _parse(file)
    metadata = header.pop("__metadata__", {})
    begin = _LENGTH + _header_length(file)
    return {name: _weight(file, begin, name, entry) for name, entry in header.items()}, dict(metadata)


def _header_length(file: WeightFile) -> int:
    raw = bytearray(_LENGTH)
    file.read_into(memoryview(raw), 0)
    length = int.from_bytes(raw, "little")
    if length > min(_MAX_HEADER, file.size - _LENGTH):
        raise CheckpointCorruptError(f"{file.path} is no safetensors file, or it is cut: {file.size} bytes in all")
    return length


def _parse(file: WeightFile) -> dict[str, Any]:
    raw = bytearray(_header_length(file))
    file.read_into(memoryview(raw), _LENGTH)
    try:
        header = json.loads(raw)
    except ValueError as error:
        raise CheckpointCorruptError(f"{file.path} is no safetensors file: its header is no JSON") from error
    if not isinstance(header, dict):
        raise CheckpointCorruptError(f"{file.path} is no safetensors file: its header is no object")
    return header


def _weight(file: WeightFile, begin: int, name: str, entry: Any) -> FileWeight:
    try:
        dtype, shape = _CODES[entry["dtype"]], tuple(int(length) for length in entry["shape"])
        first, last = (int(offset) for offset in entry["data_offsets"])
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointCorruptError(f"{file.path}: {name} has an entry that cannot be read: {entry}") from error
    by_shape = prod(shape) * dtype.itemsize
    if last - first != by_shape or first < 0 or min(shape, default=0) < 0:
        raise CheckpointCorruptError(
            f"{file.path}: {name} has {last - first} bytes, and {by_shape} by its shape {list(shape)}"
        )
    if begin + last > file.size:
        raise CheckpointCorruptError(
            f"{file.path} is cut: {name} ends at byte {begin + last}, and the file has {file.size}"
        )
    return FileWeight(file, begin + first, shape, dtype, dtype, name)

"""Private names of torch that pickles of its distributed checkpoints hold."""

import pickle
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.serialization import _get_layout


def _member(encodings: Any, name: str) -> Any:
    """Placeholder of ``getattr``, with which some versions of Python 3.11 pickle enum members."""
    if encodings is not _MEM_FORMAT_ENCODING or name not in _MEM_FORMAT_ENCODING.__members__:
        raise pickle.UnpicklingError(f"getattr({encodings!r}, {name!r})")
    return _MEM_FORMAT_ENCODING[name]


def _path(*parts: str) -> PurePosixPath:
    """Placeholder of ``PosixPath``, because a pickle can set attributes of a class that it names."""
    return PurePosixPath(*parts)


_METADATA = "torch.distributed.checkpoint.metadata"
_METADATA_OF_TORCH_2_2 = "torch.distributed._shard.sharded_tensor.metadata"
RECORDS: Mapping[tuple[str, str], Any] = {
    (_METADATA, "BytesStorageMetadata"): BytesStorageMetadata,
    (_METADATA, "ChunkStorageMetadata"): ChunkStorageMetadata,
    (_METADATA, "Metadata"): Metadata,
    (_METADATA, "MetadataIndex"): MetadataIndex,
    (_METADATA, "StorageMeta"): StorageMeta,
    (_METADATA, "TensorProperties"): TensorProperties,
    (_METADATA, "TensorStorageMetadata"): TensorStorageMetadata,
    (_METADATA, "_MEM_FORMAT_ENCODING"): _MEM_FORMAT_ENCODING,
    (_METADATA_OF_TORCH_2_2, "MEM_FORMAT_ENCODING"): _MEM_FORMAT_ENCODING,
    (_METADATA_OF_TORCH_2_2, "TensorProperties"): TensorProperties,
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): _StorageInfo,
    ("torch.serialization", "_get_layout"): _get_layout,
    ("torch", "Size"): torch.Size,
    ("torch", "device"): torch.device,
    ("collections", "OrderedDict"): OrderedDict,
    ("builtins", "set"): set,
    ("builtins", "getattr"): _member,
    ("pathlib", "PosixPath"): _path,
    ("pathlib._local", "PosixPath"): _path,  # of Python 3.13
}
"""All that a pickle of records may name, with the object that stands for it; dtypes of torch aside."""

"""Plain safetensors files of a model: which those are, and what their headers say."""

import json
from pathlib import Path

import torch

from accel_ckpt.container import Span, read_header
from accel_ckpt.files import FileSource
from accel_ckpt.tensors import CODES, dtype_of
from accel_state.errors import CheckpointCorruptError, CheckpointError

INDEX = "index.json"
# Codes that only newer safetensors writers use, beside those in tensors.CODES.
_NEWER = {"C64": "complex64", "F8_E8M0": "float8_e8m0fnu"}


def model_files(path: Path) -> list[Path]:
    """The safetensors files of a model: one file, those of an index, or what a folder holds of either.

    Raises:
        CheckpointError: there is none, or only files of formats that may run code when read.
        CheckpointCorruptError: an index that is none.
    """
    if path.is_dir():
        indices = sorted(path.glob(f"*.safetensors.{INDEX}"))
        plain = sorted(path.glob("*.safetensors"))
        chosen = indices or ([path / "model.safetensors"] if path / "model.safetensors" in plain else plain)
        if len(chosen) != 1:
            others = sorted(entry.name for entry in path.iterdir())[:8]
            raise CheckpointError(
                f"{path} should hold one safetensors file or index, but holds {len(chosen)}; there are: "
                f"{', '.join(others) or 'no files'}. Files of other formats may run code when read and are refused"
            )
        path = chosen[0]
    if not path.is_file():
        raise CheckpointError(f"there is no file {path}")
    if path.name.endswith(INDEX):
        return _indexed(path)
    if path.suffix != ".safetensors":
        raise CheckpointError(f"{path} is no safetensors file; other formats may run code when read and are refused")
    return [path]


def read_plain(source: FileSource) -> tuple[dict[str, Span], dict[str, str]]:
    """The tensors of a file by name, and what its writer noted: tied names, each with the first of its tensor.

    Raises:
        CheckpointCorruptError: it has no header of a safetensors file, or one that does not fit its size.
    """

    def read(begin: int, end: int) -> bytes:
        content = bytearray(end - begin)
        source.read_into(memoryview(content), begin)
        return bytes(content)

    spans = read_header(read, source.size, str(source.path))
    length = int.from_bytes(read(0, 8), "little")
    metadata = json.loads(read(8, 8 + length)).get("__metadata__", {})
    return spans, metadata if isinstance(metadata, dict) else {}


def dtype_of_code(code: str, key: str) -> torch.dtype:
    """The dtype that a header's code stands for.

    Raises:
        CheckpointError: this torch has none such; ``key`` is the tensor's name, for the message.
    """
    names = {found: name for name, found in CODES.items()} | _NEWER
    dtype = dtype_of(names[code])
    if dtype is None:
        raise CheckpointError(f"this torch has no dtype for {code}, which {key} has")
    return dtype


def _indexed(path: Path) -> list[Path]:
    try:
        names = sorted(set(json.loads(path.read_bytes())["weight_map"].values()))
        if not all(isinstance(name, str) and Path(name).name == name and name not in ("", "..") for name in names):
            raise ValueError("a file outside of its folder")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointCorruptError(f"{path}: ill-formed index: {error}") from error
    return [path.parent / name for name in names]

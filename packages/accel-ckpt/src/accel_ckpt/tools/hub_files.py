"""Plain safetensors files of a model: finding them, parsing their headers, loading all of them."""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path

import torch

from accel_ckpt.format.blocks import ByteSource, read_full, read_range
from accel_ckpt.format.safetensors_file import Span, read_header
from accel_ckpt.format.tensors import CODES, byte_view, dtype_of
from accel_ckpt.io.local_files import FileSource
from accel_ckpt.io.storage import Location, is_folder, locate, storage_of
from accel_ckpt.io.thread_pool import run_jobs
from accel_state.device.huge_pages import new_tensor
from accel_state.errors import CheckpointCorruptError, CheckpointError

INDEX = "index.json"
_MAX_INDEX = 2**28
_READ_JOB = 32 * 2**20
# dtype codes of newer safetensors writers, in addition to those in tensors.CODES.
_NEWER = {"C64": "complex64", "F8_E8M0": "float8_e8m0fnu"}


def load_model_files(path: str | os.PathLike[str]) -> dict[str, torch.Tensor]:
    """Loads the tensors of a safetensors file, index, or folder with either onto the CPU; tied names are tied again.

    Raises:
        CheckpointError: there is none, or only files of formats that may run code when read.
        CheckpointCorruptError: a file does not match its header or the index.
    """
    files = model_files(locate(path))
    loaded: dict[str, torch.Tensor] = {}
    jobs: list[Callable[[], None]] = []
    aliases: dict[str, str] = {}
    with ExitStack() as opened:
        for file in files:
            source = opened.enter_context(closing(open_plain(file)))
            spans, metadata = read_plain(source, str(file))
            for key, span in spans.items():
                loaded[key] = new_tensor(span.shape, dtype_of_code(span.code, key))
                jobs += _read_jobs(source, byte_view(loaded[key]), span.begin)
            aliases |= {key: first for key, first in metadata.items() if key != "format"}
        run_jobs(jobs)
    tied = {key: loaded[first] for key, first in aliases.items() if key not in loaded and first in loaded}
    return loaded | tied


def model_files(place: Location) -> list[Location]:
    """Returns the safetensors files of a model: one file, those of an index, or those that a folder holds.

    Raises:
        CheckpointError: there is none, or only files of formats that may run code when read.
        CheckpointCorruptError: an index is malformed.
    """
    storage = storage_of(place)
    if is_folder(storage, place):
        names = sorted(storage.listing(place))
        indices = [name for name in names if name.endswith(f".safetensors.{INDEX}")]
        plain = [name for name in names if name.endswith(".safetensors")]
        chosen = indices or (["model.safetensors"] if "model.safetensors" in plain else plain)
        if len(chosen) != 1:
            raise CheckpointError(
                f"{place} should hold one safetensors file or index, but holds {len(chosen)}; there are: "
                f"{', '.join(names[:8]) or 'no files'}. Files of other formats may run code when read and are refused"
            )
        place = place / chosen[0]
    if place.name.endswith(INDEX):
        return _indexed(place)
    if not place.name.endswith(".safetensors"):
        there = place.name in storage.listing(place.parent) if is_folder(storage, place.parent) else False
        raise CheckpointError(
            f"{place} is no safetensors file; other formats may run code when read and are refused"
            if there
            else f"there is no file {place}"
        )
    return [place]


def open_plain(file: Location) -> ByteSource:
    """Opens a file for reading; a local file may be behind links, as in the cache of the Hub's tools.

    Raises:
        CheckpointError: the file does not exist.
    """
    if not isinstance(file, Path):
        return storage_of(file).open(file)
    if not file.is_file():
        raise CheckpointError(f"there is no file {file}")
    return FileSource(file.resolve())


def read_plain(source: ByteSource, name: str) -> tuple[dict[str, Span], dict[str, str]]:
    """Returns the tensors of a file by name, and its metadata: tied names, each with the name that is stored.

    ``name`` is the file's name in messages.

    Raises:
        CheckpointCorruptError: the header is not that of a safetensors file, or does not match the file's size.
    """
    read = partial(read_range, source)
    spans = read_header(read, source.size, name)
    length = int.from_bytes(read(0, 8), "little")
    metadata = json.loads(read(8, 8 + length)).get("__metadata__", {})
    notes = metadata.items() if isinstance(metadata, dict) else ()
    return spans, {key: text for key, text in notes if isinstance(text, str)}


def dtype_of_code(code: str, key: str) -> torch.dtype:
    """Returns the torch dtype for a dtype code in a header.

    Raises:
        CheckpointError: this torch lacks the dtype; ``key`` is the tensor's name in the message.
    """
    names = {found: name for name, found in CODES.items()} | _NEWER
    dtype = dtype_of(names[code])
    if dtype is None:
        raise CheckpointError(f"this torch has no dtype for {code}, which {key} has")
    return dtype


def _indexed(path: Location) -> list[Location]:
    try:
        with closing(open_plain(path)) as source:
            content = read_full(source, path.name, _MAX_INDEX)
        names = sorted(set(json.loads(content)["weight_map"].values()))
        if not all(isinstance(name, str) and Path(name).name == name and name not in ("", "..") for name in names):
            raise ValueError("a file outside of its folder")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointCorruptError(f"{path}: ill-formed index: {error}") from error
    return [path.parent / name for name in names]


def _read_jobs(source: ByteSource, view: memoryview, begin: int) -> Iterator[Callable[[], None]]:
    for at in range(0, len(view), _READ_JOB):
        yield lambda at=at: source.read_into(begin + at, view[at : at + _READ_JOB])  # type: ignore[misc]

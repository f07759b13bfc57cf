"""Sharded loading of a model from plain safetensors files: each rank reads only its shards."""

import os
from collections.abc import Mapping
from contextlib import ExitStack, closing
from math import prod

import torch

from accel_ckpt.format.blocks import ByteSource
from accel_ckpt.format.safetensors_file import Span
from accel_ckpt.format.shard_layout import boxes, local_shape
from accel_ckpt.format.tensors import as_dtensor, byte_view, distributed_like, dtensor_layout
from accel_ckpt.io.storage import locate
from accel_ckpt.private import shard_of
from accel_ckpt.tools.hub_files import dtype_of_code, model_files, open_plain, read_plain
from accel_state.errors import CheckpointMismatchError


def load_model_parts(path: str | os.PathLike[str], like: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Loads the tensors of a safetensors file, index or folder, each placed like the tensor of its name in ``like``.

    If that is a DTensor, only this rank's shard is read; a plain tensor is read in full, onto its device. Names that
    are not in ``like`` are read in full onto the CPU, so that a strict load can refuse them; names that were tied when
    written are found under either name. Dtypes are those of the file. Not a collective.

    Raises:
        CheckpointError: there is no such file, or its format may run code when read.
        CheckpointCorruptError: a file does not match its header or the index.
        CheckpointMismatchError: a tensor has another shape than in ``like``.
    """
    loaded: dict[str, torch.Tensor] = {}
    with ExitStack() as opened:
        for file in model_files(locate(path)):
            source = opened.enter_context(closing(open_plain(file)))
            spans, metadata = read_plain(source, str(file))
            tied = {key: first for key, first in metadata.items() if key in like and first in spans}
            names = tied | {key: key for key in spans}
            for key, stored in names.items():
                loaded[key] = _part(key, source, spans[stored], like.get(key))
    return loaded


def _bytes(source: ByteSource, begin: int, end: int) -> torch.Tensor:
    """Returns a range of a file, mapped if possible, so that only accessed pages are read."""
    memory = source.mapped()
    if memory is not None:
        return torch.frombuffer(memory, dtype=torch.uint8)[begin:end]
    content = torch.empty(end - begin, dtype=torch.uint8, device="cpu")
    source.read_into(begin, byte_view(content))
    return content


def _part(key: str, source: ByteSource, span: Span, like: torch.Tensor | None) -> torch.Tensor:
    dtype = dtype_of_code(span.code, key)
    if not prod(span.shape):
        saved = torch.empty(span.shape, dtype=dtype, device="cpu")
    else:
        raw = _bytes(source, span.begin, span.end)
        saved = (raw if raw.data_ptr() % dtype.itemsize == 0 else raw.clone()).view(dtype).view(span.shape)
    if like is None:
        return saved.clone()
    if tuple(like.shape) != tuple(span.shape):
        raise CheckpointMismatchError(f"{key} has shape {tuple(span.shape)} in the file and {tuple(like.shape)} here")
    dtensor = as_dtensor(like)
    if dtensor is None:
        return saved.to(like.device, copy=True)
    layout = dtensor_layout(key, dtensor)
    local = torch.empty(shard_of(dtensor).shape if layout is None else local_shape(layout), dtype=dtype, device="cpu")
    for box, here in () if layout is None else boxes(layout):
        rows = tuple(slice(at, at + size) for at, size in zip(box.offset, box.shape, strict=True))
        local[tuple(slice(at, at + size) for at, size in zip(here.offset, here.shape, strict=True))] = saved[rows]
    placed: torch.Tensor = distributed_like(local.to(shard_of(dtensor).device), dtensor)
    return placed

"""This rank's part of a model that lies in plain safetensors files, without reading the rest."""

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
from accel_ckpt.tools.hub_files import dtype_of_code, model_files, open_plain, read_plain
from accel_state.errors import CheckpointMismatchError


def load_model_parts(path: str | os.PathLike[str], like: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of a safetensors file, index or folder, each placed as the one of its name in ``like``.

    Of a tensor that is a DTensor there only this rank's part is read; a plain one comes whole, on the device of its
    model. Names that ``like`` does not have come whole on the CPU, so that a strict load can refuse them; names that
    were tied when written are found under either. Dtypes are those saved. Not a collective.

    Raises:
        CheckpointError: there is no such file, or it is of a format that may run code when read.
        CheckpointCorruptError: a file is not what its header or the index says.
        CheckpointMismatchError: a tensor has another shape than its model.
    """
    loaded: dict[str, torch.Tensor] = {}
    with ExitStack() as opened:
        for file in model_files(locate(path)):
            source = opened.enter_context(closing(open_plain(file)))
            spans, metadata = read_plain(source, str(file))
            names = {key: key for key in spans}
            names |= {key: first for key, first in metadata.items() if key in like and first in spans}
            for key, stored in names.items():
                if key != stored and stored in like:
                    continue  # tied here as well, under the name that is stored
                loaded[key] = _part(key, source, spans[stored], like.get(key))
    return loaded


def _bytes(source: ByteSource, begin: int, end: int) -> torch.Tensor:
    """A range of a file: mapped where that is possible, so that only what is touched is read."""
    memory = source.mapped()
    if memory is not None:
        return torch.frombuffer(memory, dtype=torch.uint8)[begin:end]
    content = torch.empty(end - begin, dtype=torch.uint8)
    source.read_into(begin, byte_view(content))
    return content


def _part(key: str, source: ByteSource, span: Span, like: torch.Tensor | None) -> torch.Tensor:
    dtype = dtype_of_code(span.code, key)
    if not prod(span.shape):
        saved = torch.empty(span.shape, dtype=dtype)
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
    local = torch.empty(dtensor._local_tensor.shape if layout is None else local_shape(layout), dtype=dtype)
    for box, here in () if layout is None else boxes(layout):
        rows = tuple(slice(at, at + size) for at, size in zip(box.offset, box.shape, strict=True))
        local[tuple(slice(at, at + size) for at, size in zip(here.offset, here.shape, strict=True))] = saved[rows]
    placed: torch.Tensor = distributed_like(local.to(dtensor._local_tensor.device), dtensor)
    return placed

"""This rank's part of a model that lies in plain safetensors files, without reading the rest."""

import os
from collections.abc import Mapping
from contextlib import ExitStack, closing
from math import prod
from pathlib import Path

import torch

from accel_ckpt.container import Span
from accel_ckpt.files import FileSource
from accel_ckpt.layout import boxes, local_shape
from accel_ckpt.plain_files import dtype_of_code, model_files, read_plain
from accel_ckpt.tensors import as_dtensor, dtensor_layout
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
        for file in model_files(Path(path).expanduser()):
            source = opened.enter_context(closing(FileSource(file.resolve())))
            spans, metadata = read_plain(source)
            names = {key: key for key in spans}
            names |= {key: first for key, first in metadata.items() if key in like and first in spans}
            content = _mapped(source)
            for key, stored in names.items():
                if key != stored and stored in like:
                    continue  # tied here as well, under the name that is stored
                loaded[key] = _part(key, content, spans[stored], like.get(key))
    return loaded


def _mapped(source: FileSource) -> torch.Tensor:
    return torch.frombuffer(source.mapped(), dtype=torch.uint8)


def _part(key: str, content: torch.Tensor, span: Span, like: torch.Tensor | None) -> torch.Tensor:
    dtype = dtype_of_code(span.code, key)
    if not prod(span.shape):
        saved = torch.empty(span.shape, dtype=dtype)
    else:
        raw = content[span.begin : span.end]
        saved = (raw if span.begin % dtype.itemsize == 0 else raw.clone()).view(dtype).view(span.shape)
    if like is None:
        return saved.clone()
    if tuple(like.shape) != tuple(span.shape):
        raise CheckpointMismatchError(f"{key} has shape {tuple(span.shape)} in the file and {tuple(like.shape)} here")
    dtensor = as_dtensor(like)
    if dtensor is None:
        return saved.to(like.device, copy=True)
    from torch.distributed.tensor import DTensor

    layout = dtensor_layout(key, dtensor)
    local = torch.empty(dtensor._local_tensor.shape if layout is None else local_shape(layout), dtype=dtype)
    for box, here in () if layout is None else boxes(layout):
        rows = tuple(slice(at, at + size) for at, size in zip(box.offset, box.shape, strict=True))
        local[tuple(slice(at, at + size) for at, size in zip(here.offset, here.shape, strict=True))] = saved[rows]
    return DTensor.from_local(
        local.to(dtensor._local_tensor.device),
        dtensor.device_mesh,
        dtensor.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )

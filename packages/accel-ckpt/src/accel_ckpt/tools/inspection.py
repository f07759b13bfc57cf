"""Inspection of checkpoints, without the model, a process group or the memory to hold one."""

import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from accel_ckpt.format.manifest import MANIFEST, TensorEntry
from accel_ckpt.format.tree import leaves, show_path
from accel_ckpt.io.storage import Location, Storage, is_folder, locate, storage_of
from accel_ckpt.loading.checkpoint import Checkpoint, open_checkpoint
from accel_ckpt.series.directory import number_of
from accel_state.errors import CheckpointError

# Elements that are compared at a time: differences are computed in float64, up to 8 times as large.
_SLICE = 2**20


@dataclass(frozen=True, slots=True)
class ListedCheckpoint:
    """Summary of a checkpoint. ``number`` is its number in a series; None if its name is not that of a series.

    ``problem`` is None unless its manifest cannot be read.
    """

    number: int | None
    path: Location
    created: str
    world_size: int
    nbytes: int
    metadata: Mapping[str, Any]
    problem: str | None


@dataclass(frozen=True, slots=True)
class DescribedTensor:
    """Tensor of a state: its path, dtype, shape, size in bytes, and number of parts."""

    place: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    parts: int


@dataclass(frozen=True, slots=True)
class DescribedState:
    """Named state: its tensors, tied ones under each of their paths, and its other values by path."""

    name: str
    tensors: tuple[DescribedTensor, ...]
    values: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Changed:
    """Tensor that differs. ``largest`` is the largest absolute difference, ``relative`` the norm of the difference
    divided by that of the first tensor; both are NaN if shapes or dtypes differ, and ``reason`` says so then."""

    place: str
    largest: float
    relative: float
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Differences between two checkpoints; paths begin with the state's name."""

    only_first: tuple[str, ...]
    only_second: tuple[str, ...]
    tensors: tuple[Changed, ...]
    values: Mapping[str, tuple[Any, Any]]
    same: int
    """Number of equal tensors and values."""


def list_checkpoints(folder: str | os.PathLike[str]) -> list[ListedCheckpoint]:
    """Lists the checkpoints in a folder: those of a series by their numbers, then others by creation time.

    Damaged checkpoints, and numbered folders without a manifest, are listed with their problem.

    Raises:
        CheckpointError: there is no such folder.
    """
    place = locate(folder)
    storage = storage_of(place)
    if not is_folder(storage, place):
        raise CheckpointError(f"there is no folder {place}")
    listed = []
    for name, size in storage.listing(place).items():
        number = number_of(name)
        is_numbered_folder = number is not None and size is None
        if not name.startswith(".") and (is_numbered_folder or _has_manifest(storage, place / name, size)):
            listed.append(_list_one(number, place / name))
    return sorted(listed, key=lambda one: (one.number is None, one.number or 0, one.created, one.path.name))


def describe(path: str | os.PathLike[str]) -> list[DescribedState]:
    """Describes the contents of a checkpoint by state; reads no tensor."""
    with open_checkpoint(path, verify=False) as saved:
        return [_describe(saved, name) for name in saved.names]


def verify(path: str | os.PathLike[str]) -> str | None:
    """Returns a description of the damage of a checkpoint; None if every byte matches its digest."""
    try:
        open_checkpoint(path).close()
    except CheckpointError as error:
        return str(error)
    return None


def compare_checkpoints(first: str | os.PathLike[str], second: str | os.PathLike[str]) -> Comparison:
    """Compares two checkpoints; holds two tensors at a time in memory."""
    with open_checkpoint(first, verify=False) as one, open_checkpoint(second, verify=False) as other:
        ours, theirs = dict(_places(one)), dict(_places(other))
        common = [place for place in ours if place in theirs]
        tensors: list[Changed] = []
        values: dict[str, tuple[Any, Any]] = {}
        for place in common:
            a, b = ours[place], theirs[place]
            if isinstance(a, _StoredTensor) and isinstance(b, _StoredTensor):
                changed = _compare_tensors(place, one, a, other, b)
                tensors += [] if changed is None else [changed]
            elif isinstance(a, _StoredTensor) or isinstance(b, _StoredTensor) or repr(a) != repr(b):
                values[place] = (_value(a), _value(b))
        return Comparison(
            tuple(place for place in ours if place not in theirs),
            tuple(place for place in theirs if place not in ours),
            tuple(tensors),
            values,
            len(common) - len(tensors) - len(values),
        )


@dataclass(frozen=True, slots=True)
class _StoredTensor:
    key: str
    entry: TensorEntry


def _has_manifest(storage: Storage, place: Location, size: int | None) -> bool:
    """Whether a folder, or a link to one, holds a manifest; ``size`` is that of its entry in ``Storage.listing``."""
    try:
        return size in (None, -1) and MANIFEST in storage.names(place)
    except (FileNotFoundError, CheckpointError):
        return False


def _list_one(number: int | None, path: Location) -> ListedCheckpoint:
    try:
        with open_checkpoint(path, verify=False) as saved:
            manifest, metadata = saved.manifest, saved.metadata
    except CheckpointError as error:
        return ListedCheckpoint(number, path, "", 0, 0, {}, str(error))
    return ListedCheckpoint(number, path, manifest.created, manifest.world_size, manifest.nbytes, metadata, None)


def _describe(saved: Checkpoint, name: str) -> DescribedState:
    tensors: list[DescribedTensor] = []
    values: dict[str, Any] = {}
    for path, leaf in leaves(_shell(saved, name)).items():
        if isinstance(leaf, _StoredTensor):
            entry = leaf.entry
            size = math.prod(entry.shape) * saved.dtype_of(leaf.key).itemsize
            tensors.append(DescribedTensor(show_path(path), entry.dtype, entry.shape, size, len(entry.parts)))
        else:
            values[show_path(path)] = leaf
    return DescribedState(name, tuple(tensors), values)


def _shell(saved: Checkpoint, name: str) -> Any:
    return saved.read_structure(name, lambda key: _StoredTensor(key, saved.manifest.tensors[key]))


def _places(saved: Checkpoint) -> Iterator[tuple[str, Any]]:
    for name in saved.names:
        for path, leaf in leaves(_shell(saved, name)).items():
            yield show_path((name, *path)), leaf


def _compare_tensors(
    place: str, one: Checkpoint, a: _StoredTensor, other: Checkpoint, b: _StoredTensor
) -> Changed | None:
    if (a.entry.dtype, a.entry.shape) != (b.entry.dtype, b.entry.shape):
        reason = f"{a.entry.dtype} {a.entry.shape} became {b.entry.dtype} {b.entry.shape}"
        return Changed(place, math.nan, math.nan, reason)
    first, second = one.read_tensor(a.key), other.read_tensor(b.key)
    if torch.equal(first.contiguous().view(-1).view(torch.uint8), second.contiguous().view(-1).view(torch.uint8)):
        return None
    slices = zip(first.view(-1).split(_SLICE), second.view(-1).split(_SLICE), strict=True)
    measured = torch.stack([_distances(x, y) for x, y in slices])
    largest, distance = float(measured[:, 0].max()), float(torch.linalg.vector_norm(measured[:, 1]))
    norm = float(torch.linalg.vector_norm(measured[:, 2]))
    return Changed(place, largest, distance / norm if norm else math.inf)


def _distances(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Returns the largest element and the norm of ``y - x``, and the norm of ``x``."""
    wide = torch.complex128 if x.is_complex() else torch.float64
    x, y = x.to(wide), y.to(wide)
    apart = (y - x).abs()
    return torch.stack([apart.max(), torch.linalg.vector_norm(apart), torch.linalg.vector_norm(x)])


def _value(leaf: Any) -> Any:
    return f"a tensor, {leaf.entry.dtype} {leaf.entry.shape}" if isinstance(leaf, _StoredTensor) else leaf

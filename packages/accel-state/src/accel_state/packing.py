"""How many tensors become one buffer, so that one collective moves them all, and come out again.

Tensors are joined per dtype (one call into torch each way, whatever their number) and the joined pieces as bytes, the
widest dtype first, which leaves every piece aligned to its own element size. A buffer's tensors are on one device.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from accel_state.errors import CollectiveError

# A view of a buffer keeps the whole buffer alive. Below this many bytes that costs less than a copy of its own.
_SHARED_BYTES = 1 << 16


@final
@dataclass(frozen=True, slots=True)
class Piece:
    """The leaves of one dtype inside a packed buffer: their places in the list, and their bytes together."""

    dtype: torch.dtype
    indices: list[int]
    leaves: list[torch.Tensor]
    nbytes: int


@final
@dataclass(frozen=True, slots=True)
class Packed:
    """Tensors as one buffer of bytes, and what is where in it."""

    buffer: torch.Tensor
    pieces: list[Piece]
    num_leaves: int


def per_device(
    leaves: list[torch.Tensor], fn: Callable[[list[torch.Tensor]], list[torch.Tensor]]
) -> list[torch.Tensor]:
    """``fn`` applied to the leaves of each device, devices as they come up; the results in the order of the leaves."""
    found: dict[torch.device, list[int]] = {}
    for index, leaf in enumerate(leaves):
        found.setdefault(leaf.device, []).append(index)
    if len(found) == 1:
        return fn(leaves)
    results: dict[int, torch.Tensor] = {}
    for indices in found.values():
        results.update(zip(indices, fn([leaves[index] for index in indices]), strict=True))
    return [results[index] for index in range(len(leaves))]


def by_dtype(leaves: Sequence[torch.Tensor]) -> dict[torch.dtype, list[int]]:
    """Places of the leaves of each dtype, the widest dtypes first, equally wide ones as they come up."""
    found: dict[torch.dtype, list[int]] = {}
    for index, leaf in enumerate(leaves):
        found.setdefault(leaf.dtype, []).append(index)
    return found if len(found) < 2 else {dtype: found[dtype] for dtype in sorted(found, key=lambda one: -one.itemsize)}


def join(leaves: list[torch.Tensor]) -> torch.Tensor:
    """Tensors of one dtype as one 1-d tensor; a single contiguous one as a view of itself.

    Raises:
        CollectiveError: a tensor is not an ordinary strided one.
    """
    try:
        flat: torch.Tensor = _flatten_dense_tensors(leaves)
    except RuntimeError as error:
        kinds = ["nested" if leaf.is_nested else str(leaf.layout).removeprefix("torch.") for leaf in leaves]
        odd = sorted({kind for kind in kinds if kind != "strided"})
        raise CollectiveError(
            f"cannot send {' and '.join(odd)} tensors to other processes; give dense ones (tensor.to_dense(), or "
            "nested tensors padded)"
            if odd
            else f"cannot lay out {len(leaves)} tensors in one buffer: {error}"
        ) from error
    return flat.resolve_conj().resolve_neg() if len(leaves) == 1 else flat


def as_bytes(flat: torch.Tensor) -> torch.Tensor:
    """A contiguous 1-d tensor's memory as uint8, which every backend moves whatever the dtype is."""
    return flat if flat.dtype == torch.uint8 else flat.view(torch.uint8)


def pack(leaves: list[torch.Tensor]) -> Packed:
    """The leaves, all of one device, as one buffer of bytes."""
    pieces, parts = [], []
    for dtype, indices in by_dtype(leaves).items():
        members = [leaves[index] for index in indices]
        part = as_bytes(join(members))
        pieces.append(Piece(dtype, indices, members, part.numel()))
        parts.append(part)
    # A row of this per rank must be as divisible as its widest element, or the rows could not be viewed as such.
    widest = pieces[0].dtype.itemsize
    odd = sum([piece.nbytes for piece in pieces]) % widest
    if odd:
        parts.append(parts[0].new_zeros(widest - odd))
    return Packed(parts[0] if len(parts) == 1 else torch.cat(parts), pieces, len(leaves))


def unpack(packed: Packed) -> list[torch.Tensor]:
    """Views of the leaves inside the packed buffer."""
    results: dict[int, torch.Tensor] = {}
    start = 0
    for piece in packed.pieces:
        typed = packed.buffer[start : start + piece.nbytes].view(piece.dtype)
        start += piece.nbytes
        results.update(zip(piece.indices, split(typed, piece.leaves), strict=True))
    return [results[index] for index in range(packed.num_leaves)]


def split(flat: torch.Tensor, like: list[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Views of ``flat`` with the shapes of ``like``, one after the other."""
    parts: Sequence[torch.Tensor] = _unflatten_dense_tensors(flat, like)
    return parts


def split_owned(flat: torch.Tensor, like: list[torch.Tensor]) -> Sequence[torch.Tensor]:
    """``split``, with memory of their own for the parts of a buffer too large to be kept for one of them."""
    parts = split(flat, like)
    return parts if len(parts) == 1 or flat.nbytes <= _SHARED_BYTES else [part.clone() for part in parts]


def unpack_rows(rows: torch.Tensor, packed: Packed) -> list[torch.Tensor]:
    """Each leaf of all ranks, joined along dim 0, from one packed row of bytes per rank; in memory of its own."""
    results: dict[int, torch.Tensor] = {}
    start, world_size = 0, rows.shape[0]
    for piece in packed.pieces:
        part = rows[:, start : start + piece.nbytes]
        start += piece.nbytes
        typed = part.view(piece.dtype) if piece.nbytes else part.new_empty(world_size, 0, dtype=piece.dtype)
        sizes = [leaf.numel() for leaf in piece.leaves]
        columns: Sequence[torch.Tensor] = torch.split_with_sizes_copy(typed, sizes, dim=1)  # type: ignore[func-returns-value,assignment]
        for index, leaf, column in zip(piece.indices, piece.leaves, columns, strict=True):
            results[index] = column.view(gathered_shape(leaf, world_size))
    return [results[index] for index in range(packed.num_leaves)]


def gathered_shape(leaf: torch.Tensor, world_size: int) -> tuple[int, ...]:
    """Shape of a leaf joined over ``world_size`` ranks along dim 0: ``[W * n, ...]``, or ``[W]`` without dimensions."""
    shape = leaf.shape
    return (world_size * shape[0], *shape[1:]) if shape else (world_size,)

"""Buckets: many tensors in one buffer, so that one collective moves all of them.

Tensors are concatenated per dtype (one torch call each way, whatever their number), and the results as bytes, the
widest dtype first, so that every slot is aligned to its element size. The tensors of a bucket are on one device.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, final

import torch

from accel_state.errors import CollectiveError
from accel_state.private import flatten, unflatten

# A view of a buffer keeps all of the buffer alive. Below this many bytes that costs less than a copy.
_SHARED_BYTES = 1 << 16
# Bucketing a leaf saves the latency of a collective and costs two copies of the leaf. From this size on the copies cost
# more (measured over gloo: 20 leaves of 256 KiB are 1.5 times faster in a bucket, 4 of 4 MiB 3 times slower).
_LARGE_BYTES = 1 << 20

# Starts the collectives for some leaves; the returned function waits for them and returns the results.
Start = Callable[[list[torch.Tensor]], Callable[[], list[torch.Tensor]]]


@final
class BucketSlot(NamedTuple):
    """Leaves of one dtype in a bucket: indices in the list of leaves, by shape in bucket order, and size in bytes."""

    dtype: torch.dtype
    by_shape: dict[torch.Size, list[int]]
    nbytes: int


@final
class Bucket(NamedTuple):
    """Tensors as one buffer of bytes, with the slots that say where each tensor is."""

    buffer: torch.Tensor
    pieces: list[BucketSlot]
    leaves: list[torch.Tensor]


def in_batches(leaves: list[torch.Tensor], start: Start) -> list[torch.Tensor]:
    """Runs ``start`` once per device, and once per large leaf; returns the results for all leaves in their order.

    ``start`` starts the collectives for some leaves of one device and returns a function that waits for them. All of
    them are started before the first wait.
    """
    batches = split_into_batches(leaves)
    if len(batches) == 1:
        return start(leaves)()
    begun = [(indices, start([leaves[index] for index in indices])) for indices in batches]
    results: dict[int, torch.Tensor] = {}
    for indices, finish in begun:
        results.update(zip(indices, finish(), strict=True))
    return [results[index] for index in range(len(leaves))]


def split_into_batches(leaves: list[torch.Tensor]) -> list[list[int]]:
    """Returns the indices of the leaves of each bucket: one bucket per device, and one per large leaf."""
    small: dict[torch.device, list[int]] = {}
    alone = []
    for index, leaf in enumerate(leaves):
        if leaf.numel() * leaf.itemsize < _LARGE_BYTES:
            small.setdefault(leaf.device, []).append(index)
        else:
            alone.append([index])
    return [*small.values(), *alone]


def by_dtype(leaves: list[torch.Tensor]) -> dict[torch.dtype, dict[torch.Size, list[int]]]:
    """Groups the indices of the leaves by dtype and shape, the widest dtype first, otherwise in order of occurrence."""
    found: dict[torch.dtype, dict[torch.Size, list[int]]] = {}
    for index, leaf in enumerate(leaves):
        found.setdefault(leaf.dtype, {}).setdefault(leaf.shape, []).append(index)
    return found if len(found) < 2 else {dtype: found[dtype] for dtype in sorted(found, key=lambda one: -one.itemsize)}


def in_packed_order(by_shape: dict[torch.Size, list[int]]) -> list[int]:
    """Returns the indices of all leaves of one dtype, shape by shape."""
    return [index for indices in by_shape.values() for index in indices]


def join(leaves: list[torch.Tensor]) -> torch.Tensor:
    """Concatenates tensors of one dtype into one 1-d tensor; a single contiguous tensor becomes a view of itself.

    Raises:
        CollectiveError: a tensor is not dense and strided.
    """
    try:
        flat = flatten(leaves)
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
    """Views a contiguous 1-d tensor as uint8, which every backend can send whatever the dtype."""
    return flat if flat.dtype == torch.uint8 else flat.view(torch.uint8)


def pack(leaves: list[torch.Tensor]) -> Bucket:
    """Packs the leaves, all of one device, into one buffer of bytes."""
    pieces, parts = [], []
    for dtype, by_shape in by_dtype(leaves).items():
        part = as_bytes(join([leaves[index] for index in in_packed_order(by_shape)]))
        pieces.append(BucketSlot(dtype, by_shape, part.numel()))
        parts.append(part)
    if len(parts) == 1:
        return Bucket(parts[0], pieces, leaves)
    # With one row per rank, the row length must be a multiple of the widest element, so that rows can be viewed as it.
    widest = pieces[0].dtype.itemsize
    odd = sum([piece.nbytes for piece in pieces]) % widest
    if odd:
        parts.append(parts[0].new_zeros(widest - odd))
    return Bucket(torch.cat(parts), pieces, leaves)


def unpack(packed: Bucket) -> list[torch.Tensor]:
    """Returns views of the leaves inside the buffer."""
    results: dict[int, torch.Tensor] = {}
    start = 0
    for piece in packed.pieces:
        typed = packed.buffer[start : start + piece.nbytes].view(piece.dtype)
        start += piece.nbytes
        order = in_packed_order(piece.by_shape)
        like = [packed.leaves[index] for index in order]
        results.update(zip(order, _unflatten(typed, like), strict=True))
    return [results[index] for index in range(len(packed.leaves))]


def split(flat: torch.Tensor, like: list[torch.Tensor]) -> list[torch.Tensor]:
    """Splits ``flat`` into consecutive tensors of the shapes of ``like``.

    The results are detached, so that autograd does not treat them as views and each may be modified in place. Results
    of a large buffer are copies, so that one of them does not keep all of the buffer alive.
    """
    parts = _unflatten(flat, like)
    if len(like) > 1 and flat.nbytes > _SHARED_BYTES:
        return [part.clone() for part in parts]
    return [part.detach() for part in parts]


def _unflatten(flat: torch.Tensor, like: list[torch.Tensor]) -> list[torch.Tensor]:
    """Returns views of the parts of ``flat``; restores the shape of empty tensors, which torch before 2.10 drops."""
    parts = unflatten(flat, like)
    return [part if part.numel() else part.view(leaf.shape) for part, leaf in zip(parts, like, strict=True)]


def unpack_rows(rows: torch.Tensor, packed: Bucket) -> list[torch.Tensor]:
    """Returns each leaf, concatenated over ranks along dim 0, from one row of bytes per rank; detached as in ``split``.

    Makes as few torch calls per leaf as possible, because their latency dominates a gather of small tensors. Leaves of
    equal shape, frequent in batches and dicts of metrics, are split off together.
    """
    results: list[torch.Tensor] = [rows] * len(packed.leaves)
    start, world_size = 0, rows.shape[0]
    for dtype, by_shape, nbytes in packed.pieces:
        part = rows if nbytes == rows.shape[1] else rows[:, start : start + nbytes]
        start += nbytes
        typed = part.view(dtype) if nbytes else part.new_empty(world_size, 0, dtype=dtype)
        runs = _runs(by_shape, _SHARED_BYTES // (world_size * dtype.itemsize))
        if len(runs) == 1 and len(runs[0][1]) > 1:
            columns: Sequence[torch.Tensor] = (typed,)
        else:
            sizes = [shape.numel() * len(indices) for shape, indices in runs]
            columns = torch.split_with_sizes_copy(typed, sizes, dim=1)  # type: ignore[func-returns-value,assignment]
        for column, (shape, indices) in zip(columns, runs, strict=True):
            joined = gathered_shape(shape, world_size)
            if len(indices) == 1:
                results[indices[0]] = column.resize_(joined)  # the column itself rather than a view
                continue
            alike = column.view(world_size, len(indices), shape.numel()).transpose(0, 1).contiguous()
            for index, leaf in zip(indices, alike.view(len(indices), *joined).unbind(), strict=True):
                results[index] = leaf.detach()
    return results


def _runs(by_shape: dict[torch.Size, list[int]], limit: int) -> list[tuple[torch.Size, list[int]]]:
    """Groups leaves of equal shape with at most ``limit`` elements together; other leaves are groups of their own."""
    runs = []
    for shape, indices in by_shape.items():
        if len(indices) == 1 or shape.numel() * len(indices) <= limit:
            runs.append((shape, indices))
        else:
            runs.extend((shape, [index]) for index in indices)
    return runs


def gathered_shape(shape: torch.Size, world_size: int) -> tuple[int, ...]:
    """Returns ``shape`` concatenated over ``world_size`` ranks along dim 0: ``[W * n, ...]``; ``[W]`` for a scalar."""
    return (world_size * shape[0], *shape[1:]) if shape else (world_size,)

"""What every rank computed on the last batches, without the samples that were repeated to fill them."""

from collections.abc import Sequence
from typing import Any

import torch

from accel_state import collectives, nested
from accel_state.session import Session


def gather_for_metrics(
    session: Session, data: Any, real_counts: Sequence[int] | None, *, use_gather_object: bool = False
) -> Any:
    """Gathers ``data`` from all ranks and keeps each rank's first ``real_counts[rank]`` rows.

    Tensors in any nesting are concatenated along dimension 0. Anything else (or everything, with
    ``use_gather_object``) is sent as objects: a list counts its items as rows, and the result is one list.
    ``real_counts`` None keeps all rows: nothing was repeated, or nobody can know. Ranks that have no batch in this
    step (an uneven end of an epoch) are not waited for, and do not get the rows of the others.
    """
    leaves = nested.flatten(data)[0]
    as_objects = use_gather_object or not leaves or not all(isinstance(leaf, torch.Tensor) for leaf in leaves)
    if real_counts is None or session.world_size == 1 or all(count == real_counts[0] for count in real_counts):
        return _gather_equal(session, data, None if real_counts is None else real_counts[0], as_objects)
    present = [rank for rank, count in enumerate(real_counts) if count > 0]
    group = None if len(present) == session.world_size else _group_of(present)
    if as_objects:
        kept = list(data[: real_counts[session.rank]]) if isinstance(data, (list, tuple)) else data
        return collectives.gather_object(kept, group=group)
    counts = [real_counts[rank] for rank in present]
    padded = nested.map_leaves(lambda leaf: _pad_rows(leaf, max(counts)), data)
    gathered = collectives.gather(padded, group=group)
    return nested.map_leaves(lambda rows: _keep_rows(rows, counts), gathered)


def _gather_equal(session: Session, data: Any, count: int | None, as_objects: bool) -> Any:
    """All ranks keep equally many rows (None: all they have), so they are cut before they are sent."""
    if as_objects:
        cut = isinstance(data, (list, tuple)) and count is not None
        return session.gather_object(list(data[:count]) if cut else data)
    if count is not None:
        data = nested.map_leaves(lambda leaf: leaf if leaf.ndim == 0 else leaf[:count], data)
    return session.gather(data)


def _pad_rows(rows: torch.Tensor, size: int) -> torch.Tensor:
    if rows.ndim == 0 or rows.shape[0] >= size:
        return rows
    return torch.cat([rows, rows.new_zeros((size - rows.shape[0], *rows.shape[1:]))])


def _keep_rows(rows: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    """The first ``counts[i]`` rows of the i-th of equal parts; what is not one row a sample is left alone."""
    size, rest = divmod(rows.shape[0], len(counts))
    if rest or max(counts) > size:
        return rows
    return torch.cat([rows[part * size : part * size + count] for part, count in enumerate(counts)])


def _group_of(ranks: list[int]) -> torch.distributed.ProcessGroup:
    """A group of the ranks that still have data; only they take part in making it."""
    return torch.distributed.new_group(ranks, use_local_synchronization=True)

"""Results of all ranks for metrics, without the samples that were repeated to fill the last batches."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from accel_state.device.device import is_full
from accel_state.errors import DataError
from accel_state.pytree import operations as nested
from accel_state.session import Session


def gather_for_metrics(
    session: Session,
    data: Any,
    real_counts: Sequence[int] | None,
    *,
    shard_of: Sequence[int] | None = None,
    use_gather_object: bool = False,
) -> Any:
    """Gathers ``data`` from all ranks and keeps the first ``real_counts[shard]`` rows of each data shard.

    Tensors in any nesting are concatenated along dimension 0. Other data (or all data, with ``use_gather_object``) are
    gathered as objects: the items of a list or array count as rows, and the result is one list. None beside tensors
    stays None, unless ``data`` is a list. ``real_counts`` None keeps all rows: no sample was repeated, or their number
    is unknown. Ranks without a batch in this step (-1: an uneven end of an epoch) are not waited for, and do not
    receive the rows of the others. Tensors on XLA devices already have the rows of all ranks.

    Args:
        shard_of: data shard of each rank. Ranks with the same shard (they split the model, not the samples) have the
            same rows, of which the first rank's are kept. None: each rank has its own.

    Raises:
        DataError: ``data`` is no list and has tensors beside other objects, which have no rows to keep.
    """
    leaves, structure = nested.flatten(data)
    if not use_gather_object and not isinstance(data, list) and _is_mixed(leaves):
        _check_others(data)
        tensors = [leaf for leaf in leaves if leaf is not None]
        rows = iter(gather_for_metrics(session, tensors, real_counts, shard_of=shard_of))
        return nested.unflatten([None if leaf is None else next(rows) for leaf in leaves], structure)
    as_objects = use_gather_object or not leaves or not all(isinstance(leaf, torch.Tensor) for leaf in leaves)
    if not as_objects and session.world_size > 1 and any(is_full(leaf) for leaf in leaves):

        def kept(leaf: torch.Tensor) -> Any:
            if not is_full(leaf):
                return gather_for_metrics(session, leaf, real_counts, shard_of=shard_of)
            return leaf if real_counts is None or leaf.ndim == 0 else _keep_rows(leaf, real_counts)

        return nested.map_leaves(kept, data)
    speaks = [True] * session.world_size
    if shard_of is not None and len(set(shard_of)) < session.world_size:
        speaks = [shard not in shard_of[:rank] for rank, shard in enumerate(shard_of)]
        real_counts = None if real_counts is None else [real_counts[shard] for shard in shard_of]
    if real_counts is None or all(count == real_counts[0] for count in real_counts):
        count = None if real_counts is None else real_counts[0]
        gather = _gather_equal if all(speaks) else partial(_gather_speakers, speaks=speaks)
        return gather(session, data if count is None else _truncated(data, count, as_objects), as_objects=as_objects)
    real_counts = [count if one else min(count, 0) for one, count in zip(speaks, real_counts, strict=True)]
    if min(real_counts) < 0:
        return _gather_present(session, data, real_counts, as_objects)
    if as_objects:
        return session.gather_object(_first(data, real_counts[session.rank]))
    return _gather_uneven(session, leaves, structure, real_counts)


def join_parts(data: Any, count: int, group: Any) -> Any:
    """Concatenates the sequence shards (samples, tokens, ...) of the ``count`` ranks of ``group``.

    Collective: every rank of the group must call this.

    Raises:
        DataError: a leaf is not such a tensor, so that its shards cannot be concatenated.
    """
    from accel_state.collectives.tensors import gather

    wrong = [leaf for leaf in nested.flatten(data)[0] if not isinstance(leaf, torch.Tensor) or leaf.ndim < 2]
    if wrong:
        shape = f"a tensor of shape {tuple(wrong[0].shape)}" if hasattr(wrong[0], "shape") else type(wrong[0]).__name__
        raise DataError(
            f"gather_for_metrics was given {shape}, and {count} ranks have a part of each sequence; expected tensors "
            "(samples, tokens, ...); nearest: gather or reduce, which take one value of each rank"
        )
    return nested.map_leaves(lambda parts: torch.cat(parts.chunk(count), 1), gather(data, group=group))


def _is_mixed(leaves: Sequence[Any]) -> bool:
    tensors = sum(isinstance(leaf, torch.Tensor) for leaf in leaves)
    return 0 < tensors < len(leaves)


def _check_others(data: Any) -> None:
    """Checks that all leaves of ``data`` that are no tensors are None."""
    for path, leaf in nested.walk(data):
        if leaf is not None and not isinstance(leaf, torch.Tensor):
            raise DataError(
                f"gather_for_metrics was given a {type(data).__name__} with tensors and a {type(leaf).__name__} at "
                f"{path}; tensors and other objects are gathered in different ways; nearest: one call for the tensors "
                "and one for a list of the other objects, one item for each row"
            )


def _truncated(data: Any, count: int, as_objects: bool) -> Any:
    """Returns the first ``count`` rows of this rank."""
    return (
        _first(data, count) if as_objects else nested.map_leaves(lambda leaf: leaf[:count] if leaf.ndim else leaf, data)
    )


def _gather_equal(session: Session, data: Any, *, as_objects: bool) -> Any:
    """Gathers all rows, of which every rank has equally many."""
    return session.gather_object(data) if as_objects else session.gather(data)


def _gather_speakers(session: Session, data: Any, *, speaks: Sequence[bool], as_objects: bool) -> Any:
    """Gathers all rows of the ranks for which ``speaks`` is true, in rank order; every rank has equally many."""
    if as_objects:
        return session.gather_object(data if speaks[session.rank] else [])
    chosen = [rank for rank, one in enumerate(speaks) if one]

    def keep(rows: torch.Tensor) -> torch.Tensor:
        parts = rows.chunk(len(speaks))
        return torch.cat([parts[rank] for rank in chosen])

    return nested.map_leaves(keep, session.gather(data))


def _gather_uneven(session: Session, leaves: Sequence[torch.Tensor], structure: Any, counts: Sequence[int]) -> Any:
    """Gathers as many rows of each rank as ``counts`` says.

    A leaf of which a rank has fewer rows than samples has no row for each sample, like a mean over the batch: all rows
    of ranks with samples are kept.
    """
    sizes = session.gather_object([[_rows(leaf).shape[0] for leaf in leaves]])
    kept, padded = [], []
    for leaf, *of_ranks in zip(leaves, *sizes, strict=True):
        by_sample = all(size >= count for size, count in zip(of_ranks, counts, strict=True))
        kept.append(
            counts if by_sample else [size if count else 0 for size, count in zip(of_ranks, counts, strict=True)]
        )
        padded.append(_pad_rows(_rows(leaf)[: max(kept[-1])], max(kept[-1])))
    gathered = session.gather(padded)
    return nested.unflatten([_keep_rows(rows, some) for rows, some in zip(gathered, kept, strict=True)], structure)


def _gather_present(session: Session, data: Any, real_counts: Sequence[int], as_objects: bool) -> Any:
    """Gathers among the ranks that still have data, through the first of them.

    A process group of these ranks could do it in one collective, but creating a group is a collective of all ranks, and
    the others have left the loop.
    """
    from accel_state.collectives.group_argument import resolve
    from accel_state.collectives.pickled import receive_pickled, send_pickled

    group = resolve(session.group)
    assert group is not None
    count = real_counts[session.rank]
    own = _first(data, count) if as_objects else nested.map_leaves(lambda leaf: _rows(leaf)[:count].cpu(), data)
    root, *others = (rank for rank, rows in enumerate(real_counts) if rows >= 0)
    if session.rank == root:
        parts = [own, *(receive_pickled(rank, group) for rank in others)]
        for rank in others:
            send_pickled(parts, rank, group)
    else:
        send_pickled(own, root, group)
        parts = receive_pickled(root, group)
    if as_objects:
        return [item for part in parts for item in part]
    return nested.send_to_device(nested.concatenate(parts), session.device.torch)


def _first(data: Any, count: int) -> Any:
    """The first ``count`` items of a list, tuple or array; anything else is unchanged."""
    is_array = hasattr(data, "__array__") and getattr(data, "ndim", 0) > 0
    return list(data[:count]) if isinstance(data, list | tuple) or is_array else data


def _pad_rows(rows: torch.Tensor, size: int) -> torch.Tensor:
    if rows.shape[0] >= size:
        return rows
    return torch.cat([rows, rows.new_zeros((size - rows.shape[0], *rows.shape[1:]))])


def _keep_rows(rows: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    """The first ``counts[i]`` rows of the i-th of equal parts; leaves without one row a sample are unchanged."""
    size, rest = divmod(rows.shape[0], len(counts))
    if rest or max(counts) > size:
        return rows
    return torch.cat([rows[part * size : part * size + count] for part, count in enumerate(counts)])


def _rows(leaf: torch.Tensor) -> torch.Tensor:
    return leaf if leaf.ndim else leaf[None]

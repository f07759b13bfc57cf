"""Results of all ranks for metrics, without the samples that were repeated to fill the last batches."""

from collections.abc import Iterable, Mapping, Sequence
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
    rows: int | None = None,
    shard_of: Sequence[int] | None = None,
    use_gather_object: bool = False,
) -> Any:
    """Gathers ``data`` from all ranks and keeps the rows of the first ``real_counts[shard]`` samples of each shard.

    Tensors in any nesting are concatenated along dimension 0. Other data (or all data, with ``use_gather_object``) are
    gathered as objects: the items of a list, array or iterator count as rows, and the result is a list. None beside
    tensors stays None, unless ``data`` is a list. A leaf may have several rows for each sample (tokens, beams); one
    whose number of rows is no multiple of the batch's (a mean) keeps all of them. ``real_counts`` None keeps all rows:
    no sample was repeated, or their number is unknown. Ranks without a batch in this step (-1: an uneven end of an
    epoch) are not waited for, and do not receive the rows of the others. Tensors on XLA devices already have the rows
    of all ranks.

    Args:
        rows: rows of this rank's batch, repeated samples included. None: none is repeated.
        shard_of: data shard of each rank. Ranks with the same shard (they split the model, not the samples) have the
            same rows, of which the first rank's are kept. None: each rank has its own.

    Raises:
        DataError: ``data`` is no list and has tensors beside other objects, which have no rows to keep; or it is a
            set, whose items have no order.
        TypeError: ``data`` is another object without items, or a text or mapping of them.
    """
    leaves, structure = nested.flatten(data)
    if not use_gather_object and not isinstance(data, list) and _is_mixed(leaves):
        _check_others(data)
        tensors = [leaf for leaf in leaves if leaf is not None]
        gathered = iter(gather_for_metrics(session, tensors, real_counts, rows=rows, shard_of=shard_of))
        return nested.unflatten([None if leaf is None else next(gathered) for leaf in leaves], structure)
    as_objects = use_gather_object or not leaves or not all(isinstance(leaf, torch.Tensor) for leaf in leaves)
    if as_objects:
        data = _items(data)
    if not as_objects and session.world_size > 1 and any(is_full(leaf) for leaf in leaves):
        gather_leaf = partial(_gather_full, session, real_counts=real_counts, rows=rows, shard_of=shard_of)
        return nested.map_leaves(gather_leaf, data)
    speaks = [True] * session.world_size
    if shard_of is not None and len(set(shard_of)) < session.world_size:
        speaks = [shard not in shard_of[:rank] for rank, shard in enumerate(shard_of)]
        real_counts = None if real_counts is None else [real_counts[shard] for shard in shard_of]
    if real_counts is None or all(count == real_counts[0] for count in real_counts):
        own = data if real_counts is None else _truncated(data, real_counts[0], rows, as_objects)
        gather = _gather_equal if all(speaks) else partial(_gather_speakers, speaks=speaks)
        return gather(session, own, as_objects=as_objects)
    real_counts = [count if one else min(count, 0) for one, count in zip(speaks, real_counts, strict=True)]
    if min(real_counts) < 0:
        return _gather_present(session, data, real_counts, rows, as_objects)
    count = real_counts[session.rank]
    if as_objects:
        return session.gather_object(_truncated(data, count, rows, as_objects))
    return _gather_uneven(session, [_first_rows(leaf, count, rows) for leaf in leaves], structure)


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


def _items(data: Any) -> Any:
    """Returns the items of a list, tuple, array or iterator as a list; other objects, which have no rows, unchanged."""
    if isinstance(data, set | frozenset):
        raise DataError(
            f"gather_for_metrics was given a {type(data).__name__}, whose items have no order, so that those of "
            "repeated samples cannot be told; nearest: a list with one item for each row"
        )
    is_scalar = isinstance(data, str | bytes | Mapping) or getattr(data, "ndim", 1) == 0
    return list(data) if isinstance(data, Iterable) and not is_scalar else data


def _kept(length: int, count: int, rows: int | None) -> int:
    """Returns how many of the ``length`` rows of a leaf belong to the first ``count`` of ``rows`` samples.

    A leaf without equally many rows for each sample, like a mean over the batch, belongs to all of them.
    """
    rows = count if rows is None else rows
    if count <= 0:
        return 0
    return length if length % rows else length // rows * count


def _truncated(data: Any, count: int, rows: int | None, as_objects: bool) -> Any:
    """Returns what this rank's first ``count`` samples contribute."""
    if as_objects:
        return data[: _kept(len(data), count, rows)] if isinstance(data, list) else data
    return nested.map_leaves(lambda leaf: _first_rows(leaf, count, rows) if leaf.ndim else leaf, data)


def _first_rows(leaf: torch.Tensor, count: int, rows: int | None) -> torch.Tensor:
    """Returns the rows of the first ``count`` samples; a scalar is one row."""
    leaf = leaf if leaf.ndim else leaf[None]
    return leaf[: _kept(leaf.shape[0], count, rows)]


def _gather_equal(session: Session, data: Any, *, as_objects: bool) -> Any:
    """Gathers all rows, of which every rank has equally many."""
    return session.gather_object(data) if as_objects else session.gather(data)


def _gather_full(
    session: Session,
    leaf: torch.Tensor,
    *,
    real_counts: Sequence[int] | None,
    rows: int | None,
    shard_of: Sequence[int] | None,
) -> Any:
    """Gathers a leaf, unless it already has the rows of all ranks."""
    if not is_full(leaf):
        return gather_for_metrics(session, leaf, real_counts, rows=rows, shard_of=shard_of)
    if real_counts is None or leaf.ndim == 0 or leaf.shape[0] % len(real_counts):
        return leaf
    size = leaf.shape[0] // len(real_counts)
    return _keep_rows(leaf, [_kept(size, count, rows) for count in real_counts])


def _gather_speakers(session: Session, data: Any, *, speaks: Sequence[bool], as_objects: bool) -> Any:
    """Gathers all rows of the ranks for which ``speaks`` is true, in rank order; every rank has equally many."""
    if as_objects:
        return session.gather_object(data if speaks[session.rank] else [])
    chosen = [rank for rank, one in enumerate(speaks) if one]

    def keep(rows: torch.Tensor) -> torch.Tensor:
        parts = rows.chunk(len(speaks))
        return torch.cat([parts[rank] for rank in chosen])

    return nested.map_leaves(keep, session.gather(data))


def _gather_uneven(session: Session, leaves: Sequence[torch.Tensor], structure: Any) -> Any:
    """Gathers leaves of which the ranks have different numbers of rows."""
    sizes = list(zip(*session.gather_object([[leaf.shape[0] for leaf in leaves]]), strict=True))
    padded = [_pad_rows(leaf, max(of_ranks)) for leaf, of_ranks in zip(leaves, sizes, strict=True)]
    gathered = zip(session.gather(padded), sizes, strict=True)
    return nested.unflatten([_keep_rows(rows, of_ranks) for rows, of_ranks in gathered], structure)


def _gather_present(session: Session, data: Any, real_counts: Sequence[int], rows: int | None, as_objects: bool) -> Any:
    """Gathers among the ranks that still have data, through the first of them.

    A process group of these ranks could do it in one collective, but creating a group is a collective of all ranks, and
    the others have left the loop.
    """
    from accel_state.collectives.group_argument import resolve
    from accel_state.collectives.pickled import receive_pickled, send_pickled

    group = resolve(session.group)
    assert group is not None
    count = real_counts[session.rank]
    if as_objects:
        own = _truncated(data, count, rows, as_objects)
    else:
        own = nested.map_leaves(lambda leaf: _first_rows(leaf, count, rows).cpu(), data)
    root, *others = (rank for rank, held in enumerate(real_counts) if held >= 0)
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


def _pad_rows(rows: torch.Tensor, size: int) -> torch.Tensor:
    if rows.shape[0] >= size:
        return rows
    return torch.cat([rows, rows.new_zeros((size - rows.shape[0], *rows.shape[1:]))])


def _keep_rows(rows: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    """Returns the first ``counts[i]`` rows of the i-th of equal parts."""
    parts = rows.split(rows.shape[0] // len(counts)) if rows.shape[0] else [rows] * len(counts)
    return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])

"""Division of the batches that one rank reads into the rows of each rank, with the number of real rows."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch

from accel_state.errors import DataError
from accel_state.pytree.structure import children, rebuild

SliceFunction = Callable[..., Any]
"""``slice_fn(batch, slice, process_index=, num_processes=)``: returns one rank's rows of a batch."""
_SCALARS = (str, bytes, int, float, complex, type(None))


@final
class _Absent:
    """Stands for the batch of a rank that has none in this step. Pickles to itself."""

    def __reduce__(self) -> str:
        return "ABSENT"


ABSENT = _Absent()


@final
@dataclass(frozen=True, slots=True)
class Dealt:
    """One step: a batch per shard (or ``ABSENT``), and the total of rows.

    ``counts`` are the real rows of each shard, ``sizes`` its rows with padding; None: all have equally many real ones.
    """

    parts: tuple[Any, ...]
    counts: tuple[int, ...] | None
    sizes: tuple[int, ...] | None
    rows: int


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Dealer:
    """Rules by which batches become steps.

    A full step takes one batch per shard and passes them on unchanged; with ``split`` it takes one batch and slices it.
    Only the last step of an epoch may be incomplete. With ``even`` its rows are redistributed as equally as possible,
    and padded by repeating the first rows; if rows cannot be redistributed (ragged batches, objects, a collation that
    makes another number of rows, lists that may hold samples or columns, batches of no fixed size), batches stay full
    and the first ones are repeated.
    """

    shards: int
    split: bool = False
    even: bool = True
    drop_last: bool = False
    batch_rows: int | None = None
    """Rows of a full batch; None: no fixed size. A batch that the dataset makes itself counts as one row."""
    slice_fn: SliceFunction | None = None

    @property
    def takes(self) -> int:
        """Number of batches of a full step."""
        return 1 if self.split else self.shards

    def deal(self, batches: Sequence[Any], rows: Sequence[int]) -> Dealt | None:
        """Builds a step from at least one and at most ``takes`` batches; None if the step is dropped.

        ``rows[i]`` is the number of rows of ``batches[i]``.
        """
        total = sum(rows)
        full = len(batches) == self.takes and (
            self.batch_rows is None or all(count == self.batch_rows for count in rows)
        )
        if not full and self.drop_last:
            return None
        if self.split:
            self._check_rows(batches[0], total)
            return self._cut(self._filled(batches[0], total), total, full)
        if full and self.slice_fn is None:
            sizes = None if len(set(rows)) == 1 else tuple(rows)
            return Dealt(tuple(batches), sizes, sizes, total)
        if self.batch_rows is None or not self.even:
            return self._whole(batches, rows)
        if self.slice_fn is None and (
            not all(map(_can_be_sliced, batches, rows)) or all(map(_may_be_samples, batches, rows))
        ):
            return self._whole(batches, rows)
        try:
            joined = join_rows(batches, rows)
            filled = self._filled(joined, total)
            if self.slice_fn is None:
                held = total + -total % self.shards
                if _may_be_samples(joined, total) or _may_be_samples(filled, held) or not _can_be_sliced(filled, held):
                    return self._whole(batches, rows)
                return self._cut(filled, total, full)
        except (TypeError, ValueError, RuntimeError):  # ragged: rows of different batches cannot be concatenated
            return self._whole(batches, rows)
        return self._cut(filled, total, full)  # what the user's function raises is raised

    def _whole(self, batches: Sequence[Any], rows: Sequence[int]) -> Dealt:
        missing = self.shards - len(batches)
        filling = [batches[i % len(batches)] if self.even else ABSENT for i in range(missing)]
        absent = 0 if self.even else -1
        sizes = (*rows, *[rows[i % len(rows)] if self.even else 0 for i in range(missing)])
        return Dealt((*batches, *filling), (*rows, *[absent] * missing), sizes, sum(rows))

    def _filled(self, batch: Any, rows: int) -> Any:
        """Returns a batch of ``rows`` rows with the first ones repeated, if the ranks get equally many."""
        missing = -rows % self.shards if self.even else 0
        return join_rows([batch, repeat_rows(batch, rows, missing)], [rows, missing]) if missing else batch

    def _cut(self, batch: Any, rows: int, full: bool) -> Dealt:
        """Slices a ``_filled`` batch, of which the first ``rows`` rows are real."""
        size = -(-rows // self.shards)
        starts = range(0, size * self.shards, size)
        held = size * self.shards if self.even else rows
        parts = [
            self._slice(batch, slice(start, min(start + size, held)), index, held) if start < held else ABSENT
            for index, start in enumerate(starts)
        ]
        absent = 0 if self.even else -1
        if full:
            return Dealt(tuple(parts), None, None, rows)
        counts = tuple(min(rows - start, size) if start < rows else absent for start in starts)
        sizes = tuple(min(max(held - start, 0), size) for start in starts)
        return Dealt(tuple(parts), counts, sizes, rows)

    def _check_rows(self, batch: Any, rows: int) -> None:
        """Raises DataError if nothing in a batch has ``rows`` rows, so that every rank would get all of it."""
        told = set(_rows_told(batch, rows))
        if self.slice_fn is None and told and True not in told:
            raise DataError(
                f"split_batches cuts a batch of {rows} samples for {self.shards} ranks, and nothing in the "
                f"{type(batch).__name__} that the collation has made of them has {rows} rows; nearest: "
                "slice_fn_for_dispatch, which cuts it, or split_batches=False, which sends whole batches"
            )

    def _slice(self, batch: Any, wanted: slice, index: int, rows: int) -> Any:
        if self.slice_fn is not None:
            return self.slice_fn(batch, wanted, process_index=index, num_processes=self.shards)
        return slice_rows(batch, wanted, rows)


def slice_rows(batch: Any, wanted: slice, rows: int) -> Any:
    """Slices the rows of a batch of ``rows`` rows, in containers of the same types.

    A tensor has rows if its first dimension has length ``rows``; a list, if it holds ``rows`` entries in which no
    tensor has rows itself (strings, one ragged tensor per sample); a tuple, if it holds ``rows`` strings. Leaves
    without rows are returned unchanged.
    """
    if isinstance(batch, torch.Tensor):
        return batch[wanted] if _has_rows(batch, rows) else batch
    if _is_column(batch, rows):
        return batch[wanted]
    parts = children(batch)
    if parts is None:
        return batch
    sliced = {key: slice_rows(value, wanted, rows) for key, value in parts}
    return rebuild(batch, sliced.keys(), sliced.values())


def join_rows(batches: Sequence[Any], rows: Sequence[int]) -> Any:
    """Concatenates the rows of several batches; leaves without rows are those of the first batch, which stands for all.

    Raises TypeError, ValueError or RuntimeError if the batches do not match.
    """
    first = batches[0]
    if len(batches) == 1:
        return first
    if isinstance(first, torch.Tensor):
        has_rows = all(_has_rows(batch, count) for batch, count in zip(batches, rows, strict=True))
        return torch.cat(list(batches)) if has_rows else _common(batches)
    if all(_is_column(batch, count) for batch, count in zip(batches, rows, strict=True)):
        return type(first)(entry for batch in batches for entry in batch)
    columns = [children(batch) for batch in batches]
    if columns[0] is None:
        return _common(batches)
    tables = [dict(column or ()) for column in columns]
    if any(table.keys() != tables[0].keys() for table in tables):
        raise ValueError(f"batches hold {' and '.join(sorted({str(list(table)) for table in tables}))}")
    joined = [join_rows([table[key] for table in tables], rows) for key in tables[0]]
    return rebuild(first, list(tables[0]), joined)


def repeat_rows(batch: Any, rows: int, count: int) -> Any:
    """Returns ``count`` rows, from the first row on, cyclically."""
    pieces = [slice_rows(batch, slice(0, min(rows, count - start)), rows) for start in range(0, count, rows)]
    return join_rows(pieces, [min(rows, count - start) for start in range(0, count, rows)])


def _has_rows(leaf: Any, rows: int) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.ndim > 0 and len(leaf) == rows


def _common(leaves: Sequence[Any]) -> Any:
    """Returns the first of several leaves without rows; raises ValueError if tensors or objects among them differ."""
    first = leaves[0]
    for other in leaves[1:]:
        if isinstance(first, torch.Tensor):
            alike = isinstance(other, torch.Tensor) and (first.ndim == other.ndim == 0 or torch.equal(first, other))
        else:
            alike = (isinstance(first, _SCALARS) and isinstance(other, _SCALARS)) or (first == other) is True
        if first is not other and not alike:
            raise ValueError(f"batches hold {type(first).__name__} objects without rows that differ")
    return first


def _can_be_sliced(batch: Any, rows: int) -> bool:
    """Whether something in a batch has rows, and no object in it may have rows that cannot be told."""
    told = set(_rows_told(batch, rows))
    return True in told and None not in told


def _rows_told(batch: Any, rows: int) -> Iterator[bool | None]:
    """Yields, for everything in a batch that may have rows, whether it has ``rows`` of them; None: it is an object."""
    if isinstance(batch, torch.Tensor):
        if batch.ndim:
            yield _has_rows(batch, rows)
    elif _is_column(batch, rows):
        yield True
    elif (parts := children(batch)) is not None:
        for _, value in parts:
            yield from _rows_told(value, rows)
    elif not isinstance(batch, _SCALARS):
        yield None


def _may_be_samples(batch: Any, rows: int) -> bool:
    """Whether a list or tuple in a batch may hold either samples or columns: three images of three channels each.

    Its entries are alike, there are ``rows`` of them, and each column in them has ``rows`` rows.
    """
    if type(batch) in (list, tuple) and 1 < rows == len(batch) and not _is_strings(batch):
        columns = [list(_columns(entry)) for entry in batch]
        forms = {tuple((*form[:2], *map(len, form[2:])) for form, _ in entry) for entry in columns}
        if len(forms) == 1 and columns[0] and all(length == rows for entry in columns for _, length in entry):
            return True
    if _is_column(batch, rows):
        return False
    return any(_may_be_samples(value, rows) for _, value in children(batch) or ())


def _is_column(batch: Any, rows: int) -> bool:
    """Whether a list or tuple holds one entry per row, rather than being a container of columns.

    A tuple does if it holds strings, which torch's default collation leaves in a tuple. A list does unless a column in
    it (a tensor, or such a tuple) has ``rows`` rows, at any depth. Entries of one structure, with columns of the same
    dtypes and trailing shapes that do not all have that length, are the samples of a ragged batch, even if one of them
    has it.
    """
    if not isinstance(batch, list):
        return _is_strings(batch) and len(batch) == rows
    if len(batch) != rows:
        return False
    columns = [list(_columns(entry)) for entry in batch]
    long = [length == rows for entry in columns for _, length in entry]
    alike = bool(long) and len({tuple(form for form, _ in entry) for entry in columns}) == 1
    return not (all(long) if alike else any(long))


def _is_strings(data: Any) -> bool:
    return type(data) is tuple and all(isinstance(entry, str | bytes) for entry in data)


def _columns(data: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], int]]:
    """Yields path, dtype and trailing shape, and length, of everything in ``data`` that may have rows."""
    if isinstance(data, torch.Tensor):
        if data.ndim:
            yield (path, data.dtype, data.shape[1:]), len(data)
    elif _is_strings(data):
        yield (path, str), len(data)
    else:
        for key, value in children(data) or ():
            yield from _columns(value, (*path, key))

"""Padding collation of samples of different lengths, and the share of padding."""

import copy
import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeVar, final

import torch

from accel_state.errors import ConfigError, DataError

Side = Literal["left", "right"]
_SIDES = ("left", "right")
_T = TypeVar("_T")


class _Padded(NamedTuple):
    """Lengths, padded length and side of one padded name, for the mask."""

    lengths: list[int]
    padded: int
    side: Side


def padded_length(longest: int, *, multiple_of: int = 1, max_length: int | None = None) -> int:
    """Returns the length to which all sequences of a batch are padded, if the longest has ``longest`` positions.

    Rounded up to ``multiple_of`` (tensor cores are fastest with 8 or 16; compiled programs need few distinct shapes),
    but at most ``max_length``, which overrides the multiple.
    """
    length = -(-longest // multiple_of) * multiple_of
    return length if max_length is None else min(length, max_length)


def pad_sequences(
    sequences: Sequence[torch.Tensor], *, length: int, value: float = 0, side: Side = "right"
) -> torch.Tensor:
    """Stacks sequences ``(n_i, *rest)`` into ``(batch, length, *rest)``, padded with ``value`` on ``side``.

    A sequence longer than ``length`` is truncated on the padded side: right padding cuts the end, left padding the
    beginning. Dtype and device are those of the sequences. Raises ``DataError`` when dtypes or ``rest`` differ.
    """
    first = sequences[0]
    for number, other in enumerate(sequences):
        if other.shape[1:] != first.shape[1:] or other.dtype != first.dtype:
            raise DataError(
                f"sample {number} has shape {tuple(other.shape)} and dtype {other.dtype}, sample 0 has "
                f"{tuple(first.shape)} and {first.dtype}: only the first dimension may differ between samples"
            )
    if all(len(sequence) == length for sequence in sequences):
        return torch.stack(list(sequences))
    batch = first.new_full((len(sequences), length, *first.shape[1:]), value)
    for row, sequence in zip(batch, sequences, strict=True):
        kept = min(len(sequence), length)
        if side == "right":
            row[:kept] = sequence[:kept]
        else:
            row[length - kept :] = sequence[len(sequence) - kept :]
    return batch


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class PaddingCollator:
    """A ``collate_fn`` that pads every batch to its own longest sample instead of to one length for all batches.

    Samples may be mappings, dataclasses, named tuples, tuples, or bare sequences. Tensors, arrays and lists of numbers
    are sequences along their first dimension; numbers become one tensor (``int64``, ``float64``, ``bool``); strings,
    ``None`` and other objects stay a list with one entry per sample.

    A *name* below is the key or field of a sequence (``"input_ids"``), its path if the key is ambiguous
    (``"prompt.input_ids"``), or its index in a tuple (``"0"``).

    Raises ``DataError``, with the sample and the name, when samples of a batch do not match, ``ConfigError`` for
    invalid options.
    """

    keys: Collection[str] | None = None
    """Names to pad; ``None``: every sequence. Sequences of other names must have one shape in the batch."""
    ragged: Collection[str] = ()
    """Names that stay a list with one tensor per sample (bounding boxes, spans)."""
    pad_value: float | Mapping[str, float] = 0
    """Padding value, or one per name, e.g. ``{"labels": -100}``; names not in the mapping are padded with 0."""
    side: Side | Mapping[str, Side] = "right"
    """Side of the padding, or one per name; names not in the mapping are padded on the "right"."""
    multiple_of: int = 1
    """Multiple to which the padded length is rounded up. Applies to every name of ``keys``, so set ``keys`` if samples
    also hold sequences of fixed size."""
    max_length: int | None = None
    """Length at which longer sequences are truncated, on the padded side. ``None``: no truncation."""
    mask: str | None = None
    """Name of a boolean ``(batch, length)`` entry to add: True on real positions of the first padded sequence. Mapping
    samples only; an entry of that name in the samples is kept as it is."""

    def __post_init__(self) -> None:
        if self.multiple_of < 1:
            raise ConfigError(f"multiple_of is {self.multiple_of}; it must be at least 1 (1: no rounding)")
        if self.max_length is not None and self.max_length < 1:
            raise ConfigError(f"max_length is {self.max_length}; it must be at least 1, or None to cut nothing")
        sides = self.side.values() if isinstance(self.side, Mapping) else [self.side]
        for side in sides:
            if side not in _SIDES:
                raise ConfigError(f"side is {side!r}; it must be one of {', '.join(map(repr, _SIDES))}")

    def __call__(self, samples: Sequence[Any]) -> Any:
        """Collates ``samples`` into one batch with the containers of the samples."""
        if not samples:
            raise DataError("an empty list of samples cannot be collated; does the batch sampler yield empty batches?")
        done: list[_Padded] = []
        batch = self._collate(list(samples), "", done)
        if self.mask is not None:
            batch = self._with_mask(batch, done)
        return batch

    def _collate(self, column: list[Any], path: str, done: list[_Padded]) -> Any:
        first = column[0]
        if isinstance(first, Mapping):
            collated = {key: self._field(column, key, path, done) for key in first}
            if type(first) is dict:
                return collated
            batch: Any = copy.copy(first)
            for key, value in collated.items():
                batch[key] = value
            return batch
        if isinstance(first, tuple):
            self._same_width(column, path)
            names = getattr(first, "_fields", range(len(first)))
            parts = [
                self._collate([sample[i] for sample in column], _join(path, name), done) for i, name in enumerate(names)
            ]
            return type(first)(*parts) if hasattr(first, "_fields") else tuple(parts)
        if dataclasses.is_dataclass(first) and not isinstance(first, type):
            names = [field.name for field in dataclasses.fields(first)]
            changes = {
                name: self._collate([getattr(sample, name) for sample in column], _join(path, name), done)
                for name in names
            }
            return dataclasses.replace(first, **changes)
        return self._leaf(column, path, done)

    def _field(self, column: list[Any], key: Any, path: str, done: list[_Padded]) -> Any:
        for number, sample in enumerate(column):
            if key not in sample:
                raise DataError(f"sample {number} of the batch has no {key!r}; it has {', '.join(map(repr, sample))}")
        return self._collate([sample[key] for sample in column], _join(path, key), done)

    def _same_width(self, column: list[Any], path: str) -> None:
        for number, sample in enumerate(column):
            if len(sample) != len(column[0]):
                raise DataError(
                    f"sample {number} has {len(sample)} entries{_at(path)}, sample 0 has {len(column[0])}: "
                    "tuples are read as fields; give sequences of varying length as lists or tensors"
                )

    def _leaf(self, column: list[Any], path: str, done: list[_Padded]) -> Any:
        if all(isinstance(sample, bool | int | float) for sample in column):
            # Dtypes as in torch's default collation: a Python float becomes float64.
            kinds = {type(sample) for sample in column}
            return torch.tensor(column, dtype=torch.float64 if float in kinds else None)
        tensors = [_as_tensor(sample) for sample in column]
        if any(tensor is None for tensor in tensors):
            return column
        sequences = [tensor for tensor in tensors if tensor is not None]
        if any(tensor.ndim == 0 for tensor in sequences):
            return _stack(sequences, path)
        if _named(path, self.ragged):
            return sequences
        if self.keys is not None and not _named(path, self.keys):
            return _stack(sequences, path)
        lengths = [len(sequence) for sequence in sequences]
        length = padded_length(max(lengths), multiple_of=self.multiple_of, max_length=self.max_length)
        side: Side = _of(self.side, path, "right")
        done.append(_Padded(lengths, length, side))
        try:
            return pad_sequences(sequences, length=length, value=_of(self.pad_value, path, 0), side=side)
        except DataError as error:
            raise DataError(f"{error}{_at(path)}") from None

    def _with_mask(self, batch: Any, done: list[_Padded]) -> Any:
        assert self.mask is not None
        if not isinstance(batch, Mapping) or not done:
            raise DataError(
                f"mask={self.mask!r} needs samples that are mappings with at least one padded sequence; "
                f"the batch is a {type(batch).__name__}"
            )
        if self.mask not in batch:
            lengths, padded, side = done[0]
            kept = torch.tensor(lengths)[:, None]
            positions = torch.arange(padded)[None, :]
            batch[self.mask] = positions >= padded - kept if side == "left" else positions < kept  # type: ignore[index]
        return batch


def padding_share(lengths: Sequence[int], batches: Iterable[Sequence[int]], *, multiple_of: int = 1) -> float:
    """Returns the share of padding (0 to 1) if ``batches`` of sample indices are padded to their longest sample.

    ``lengths[i]`` is the length of sample ``i``. 0.4 means that 40 % of the model's computation is spent on padding.
    """
    real = 0
    total = 0
    for batch in batches:
        taken = [int(lengths[index]) for index in batch]
        real += sum(taken)
        total += padded_length(max(taken), multiple_of=multiple_of) * len(taken)
    return 1 - real / total if total else 0.0


def _as_tensor(sample: Any) -> torch.Tensor | None:
    """Converts a sample to a tensor, without a copy if possible; None if it is not numeric."""
    if isinstance(sample, torch.Tensor):
        return sample
    if isinstance(sample, list):
        flat = sample
        while flat and isinstance(flat[0], list):
            flat = flat[0]
        numeric = all(isinstance(item, bool | int | float) for item in flat)
        if not numeric:
            return None
        # An empty list has no dtype; int64, because token ids are the usual content.
        return torch.tensor(sample) if flat else torch.empty(0, dtype=torch.int64)
    dtype = getattr(sample, "dtype", None)
    if hasattr(sample, "__array__") and getattr(dtype, "kind", "O") in "biufc":
        return torch.as_tensor(sample)
    return None


def _stack(tensors: list[torch.Tensor], path: str) -> torch.Tensor:
    first = tensors[0]
    for number, other in enumerate(tensors):
        if other.shape != first.shape or other.dtype != first.dtype:
            name = path.rpartition(".")[2]
            raise DataError(
                f"sample {number} has shape {tuple(other.shape)} and dtype {other.dtype}{_at(path)}, sample 0 has "
                f"{tuple(first.shape)} and {first.dtype}; name it in keys=({name!r}, ...) to pad it or in "
                f"ragged=({name!r}, ...) to keep one tensor per sample"
            )
    return torch.stack(tensors)


def _join(path: str, name: object) -> str:
    return f"{path}.{name}" if path else str(name)


def _at(path: str) -> str:
    return f" at {path!r}" if path else ""


def _named(path: str, names: Collection[str]) -> bool:
    return path in names or path.rpartition(".")[2] in names


def _of(setting: _T | Mapping[str, _T], path: str, default: _T) -> _T:
    """Returns the setting of one name: that of its full path, otherwise that of its last component."""
    if not isinstance(setting, Mapping):
        return setting
    return setting.get(path, setting.get(path.rpartition(".")[2], default))

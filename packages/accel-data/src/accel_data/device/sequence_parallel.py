"""Sequence-parallel sharding of batches: each rank of a group computes on a shard of every sequence."""

import copy
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any, final

import torch

from accel_data.device.prefetch import Placed, Placer
from accel_state.errors import DataError

IGNORED = -100
"""Label of tokens without a loss: the default ``ignore_index`` of ``torch.nn.functional.cross_entropy``."""

Part = Callable[[Any], tuple[Any, float]]
"""Maps a batch to this rank's shard, and the weight of its mean loss among the ranks of the group."""

_TELLS_LENGTH = ("input_ids", "inputs_embeds", "shift_labels", "labels", "position_ids")


def split_sequences(batch: Any, index: int, count: int, *, expected: int | None = None) -> tuple[Any, float]:
    """Returns shard ``index`` of ``count`` equal shards of every sequence of a batch, and the weight of its mean loss.

    ``batch`` is a mapping, like a tokenizer's output. Every tensor (samples, length, ...) in it is split along dim 1;
    other values stay full. Before the split, ``labels`` become ``shift_labels``, i.e. the next token of each position,
    because the next token may be in another shard; the last position has none (-100). A batch that has ``shift_labels``
    keeps them. ``position_ids`` are added if they are missing.

    With the weight, the mean over ranks of (weight * mean loss) is the mean over all tokens whose ``shift_labels`` are
    not -100; 1.0 if there are no labels.

    Args:
        expected: length of every sequence in tokens; None: batches differ.

    Raises:
        DataError: the batch is not a mapping or has none of the names that give the length; the length is not as
            expected or not a multiple of ``count``; or an ``attention_mask`` masks tokens before unmasked ones, which
            the sharded attention would ignore.
    """
    length = _length(batch) if isinstance(batch, Mapping) else 0
    if not length:
        keys = f"mapping with {', '.join(map(repr, batch))}" if isinstance(batch, Mapping) else type(batch).__name__
        raise DataError(
            f"sequences are shared by {count} ranks, and a batch is a {keys}; expected a mapping with one of "
            f"{', '.join(_TELLS_LENGTH)}, which tell how long they are"
        )
    if expected not in (None, length):
        raise DataError(f"sequences of {length} tokens, and sp_seq_length says that all have {expected}")
    if length % count:
        raise DataError(
            f"sequences of {length} tokens do not divide into {count} parts; nearest: pad them to "
            f"{length + -length % count} (pad_to_multiple_of={count} in many collators), with labels of -100"
        )
    mine: Any = copy.copy(batch) if isinstance(batch, MutableMapping) else dict(batch)
    _check_mask(mine.get("attention_mask"))
    if _has_length(mine.get("labels"), length):
        labels = mine.pop("labels")
        if "shift_labels" not in mine:
            mine["shift_labels"] = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED)
    if "position_ids" not in mine:
        first = next(value for value in mine.values() if _has_length(value, length))
        mine["position_ids"] = torch.arange(length, device=first.device).expand(len(first), length)
    weight = _weight(mine.get("shift_labels"), index, count)
    for name, value in list(mine.items()):
        if _has_length(value, length):
            mine[name] = value.chunk(count, 1)[index].contiguous()
    return mine, weight


def _length(batch: Mapping[str, Any]) -> int:
    """Returns the number of tokens of each sequence; 0 if no tensor gives it."""
    tensors = (batch.get(name) for name in _TELLS_LENGTH)
    return next((one.shape[1] for one in tensors if isinstance(one, torch.Tensor) and one.ndim >= 2), 0)


def _has_length(value: Any, length: int) -> bool:
    return isinstance(value, torch.Tensor) and value.ndim >= 2 and value.shape[1] == length


def _weight(labels: torch.Tensor | None, index: int, count: int) -> float:
    """Returns the weight of one shard's mean loss: with it, the mean over shards is the mean over all tokens."""
    if labels is None:
        return 1.0
    tokens = [int(part.ne(IGNORED).sum()) for part in labels.chunk(count, 1)]
    return tokens[index] * count / sum(tokens) if any(tokens) else 1.0


def _check_mask(mask: Any) -> None:
    """Raises for a mask (samples, length) with unmasked tokens after masked ones."""
    if isinstance(mask, torch.Tensor) and mask.ndim == 2 and bool((mask.diff(dim=1) > 0).any()):
        raise DataError(
            "attention_mask hides tokens before others that it shows, and attention over the parts of several ranks "
            "does not get it; nearest: pad on the right (padding_side='right'), where labels of -100 say enough"
        )


@final
class PartPlacer:
    """A ``Placer`` that takes this rank's sequence shard of each batch before another placer moves it.

    Attributes:
        weight: weight of the batch that was taken last.
    """

    def __init__(self, part: Part, placer: Placer) -> None:
        self._part, self._placer = part, placer
        self.weight = 1.0

    def start(self, batch: Any) -> Placed:
        """Starts the copy of this rank's shard."""
        mine, weight = self._part(batch)
        return _PartOnItsWay(self, self._placer.start(mine), weight)


@final
class _PartOnItsWay:
    def __init__(self, owner: PartPlacer, placed: Placed, weight: float) -> None:
        self._owner, self._placed, self._weight = owner, placed, weight

    def take(self) -> Any:
        self._owner.weight = self._weight
        return self._placed.take()

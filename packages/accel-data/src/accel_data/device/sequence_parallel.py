"""The part of a batch that one rank computes on, where several share every sequence."""

import copy
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any, final

import torch

from accel_data.device.prefetch import Placed, Placer
from accel_state.errors import DataError

IGNORED = -100
"""The label of a token that counts for nothing, as ``torch.nn.functional.cross_entropy`` has it by default."""

Part = Callable[[Any], tuple[Any, float]]
"""Takes of a batch what this rank computes on, and says what the mean over it weighs among those of its peers."""

_TELLS_LENGTH = ("input_ids", "inputs_embeds", "shift_labels", "labels", "position_ids")


def split_sequences(batch: Any, index: int, count: int, *, expected: int | None = None) -> tuple[Any, float]:
    """The part ``index`` of ``count`` equal parts of every sequence of a batch, and what its mean loss weighs.

    ``batch`` is a mapping, as of a tokenizer. Every tensor (samples, length, ...) in it is cut along its second
    dimension; whatever else it holds stays whole. Before that ``labels`` become ``shift_labels``, of which each is the
    token that comes next, because the next one may be in another part; the last has none (-100). A batch with
    ``shift_labels`` of its own keeps them. ``position_ids`` are added where there are none.

    The weight makes the mean over ranks of weight times mean loss the mean over all tokens whose ``shift_labels`` are
    not -100; 1.0 where there are none.

    Args:
        expected: tokens of every sequence; None: batches differ.

    Raises:
        DataError: no mapping, none of the names that tell the length, another length, one that is no multiple of
            ``count``, or an ``attention_mask`` that hides more than ends of sequences, which no attention would see.
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
    """Tokens of each sequence; 0 where nothing tells."""
    tensors = (batch.get(name) for name in _TELLS_LENGTH)
    return next((one.shape[1] for one in tensors if isinstance(one, torch.Tensor) and one.ndim >= 2), 0)


def _has_length(value: Any, length: int) -> bool:
    return isinstance(value, torch.Tensor) and value.ndim >= 2 and value.shape[1] == length


def _weight(labels: torch.Tensor | None, index: int, count: int) -> float:
    """What the mean over one part's tokens is multiplied with, so that the parts' mean is that over all tokens."""
    if labels is None:
        return 1.0
    tokens = [int(part.ne(IGNORED).sum()) for part in labels.chunk(count, 1)]
    return tokens[index] * count / sum(tokens) if any(tokens) else 1.0


def _check_mask(mask: Any) -> None:
    """Refuses a mask (samples, length) with tokens after hidden ones."""
    if isinstance(mask, torch.Tensor) and mask.ndim == 2 and bool((mask.diff(dim=1) > 0).any()):
        raise DataError(
            "attention_mask hides tokens before others that it shows, and attention over the parts of several ranks "
            "does not get it; nearest: pad on the right (padding_side='right'), where labels of -100 say enough"
        )


@final
class PartPlacer:
    """Takes this rank's part of each batch before it is placed; a ``Placer`` around another.

    Attributes:
        weight: of the batch that was taken last.
    """

    def __init__(self, part: Part, placer: Placer) -> None:
        self._part, self._placer = part, placer
        self.weight = 1.0

    def start(self, batch: Any) -> Placed:
        """Begins the move of the part."""
        mine, weight = self._part(batch)
        return _PartOnItsWay(self, self._placer.start(mine), weight)


@final
class _PartOnItsWay:
    def __init__(self, owner: PartPlacer, placed: Placed, weight: float) -> None:
        self._owner, self._placed, self._weight = owner, placed, weight

    def take(self) -> Any:
        self._owner.weight = self._weight
        return self._placed.take()

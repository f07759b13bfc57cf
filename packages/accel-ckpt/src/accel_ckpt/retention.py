"""The checkpoints of a series to keep: pure functions from those that exist to those that stay."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from accel_ckpt.storage import Location
from accel_state.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class SavedCheckpoint:
    """One checkpoint of a series: its number, its place, and the metadata it was saved with."""

    number: int
    path: Location
    metadata: Mapping[str, Any]


Retention = Callable[[Sequence[SavedCheckpoint]], frozenset[int]]
"""Given the checkpoints in order of their numbers, the numbers of those to keep. The newest is kept in any case."""


def keep_all() -> Retention:
    """Nothing is ever removed."""
    return lambda saved: frozenset(entry.number for entry in saved)


def keep_last(count: int) -> Retention:
    """The ``count`` newest.

    Raises:
        CheckpointError: ``count`` is below 1.
    """
    _at_least_one("keep_last", count)
    return lambda saved: frozenset(entry.number for entry in saved[-count:])


def keep_every(step: int) -> Retention:
    """Those whose number is a multiple of ``step``.

    Raises:
        CheckpointError: ``step`` is below 1.
    """
    _at_least_one("keep_every", step)
    return lambda saved: frozenset(entry.number for entry in saved if entry.number % step == 0)


def keep_best(metric: str, count: int = 1, *, mode: Literal["min", "max"] = "min") -> Retention:
    """The ``count`` with the smallest (or largest) number ``metric`` in their metadata; of equal ones the newer.

    One without that number, or with NaN, is never among the best. ``metric`` may lead into nested metadata with dots.

    Raises:
        CheckpointError: ``count`` is below 1, or ``mode`` neither "min" nor "max".
    """
    _at_least_one("keep_best", count)
    if mode not in ("min", "max"):
        raise CheckpointError(f"mode={mode!r}; expected 'min' or 'max'")
    sign = 1 if mode == "min" else -1

    def keep(saved: Sequence[SavedCheckpoint]) -> frozenset[int]:
        scored = [(sign * value, -entry.number) for entry in saved if (value := _metric(entry, metric)) is not None]
        return frozenset(-number for _, number in sorted(scored)[:count])

    return keep


def keep_union(*policies: Retention) -> Retention:
    """What any of ``policies`` keeps: ``keep_union(keep_last(3), keep_every(1000))``."""
    return lambda saved: frozenset[int]().union(*(policy(saved) for policy in policies))


def to_remove(saved: Sequence[SavedCheckpoint], retention: Retention, intact: frozenset[int]) -> list[SavedCheckpoint]:
    """What may go now, oldest first: neither kept, nor the newest, nor the newest known to be ``intact``."""
    ordered = sorted(saved, key=lambda entry: entry.number)
    if not ordered:
        return []
    kept = set(retention(ordered)) | {ordered[-1].number}
    sound = [entry.number for entry in ordered if entry.number in intact]
    kept |= set(sound[-1:])
    return [entry for entry in ordered if entry.number not in kept]


def _metric(entry: SavedCheckpoint, name: str) -> float | None:
    value: Any = entry.metadata
    for part in (name,) if isinstance(value, Mapping) and name in value else name.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
        return None
    return float(value)


def _at_least_one(what: str, count: int) -> None:
    if count < 1:
        raise CheckpointError(f"{what}({count}) would keep nothing; give 1 or more")

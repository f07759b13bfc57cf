"""Retention policies: pure functions from the checkpoints of a series to those that stay."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, SupportsIndex, final

from accel_ckpt.io.storage import Location
from accel_state.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class SavedCheckpoint:
    """Checkpoint of a series: its number, its location, and its metadata."""

    number: int
    path: Location
    metadata: Mapping[str, Any]


METRICS = "metrics"
"""Metadata key of the metrics that were measured on a checkpoint, by name."""


@final
@dataclass(frozen=True, slots=True)
class Best:
    """The ``count`` checkpoints with the smallest value of ``metric``, or the largest with ``mode="max"``."""

    metric: str
    count: int = 1
    mode: Literal["min", "max"] = "min"


Retention = Callable[[Sequence[SavedCheckpoint]], frozenset[int]]
"""Maps the checkpoints in order of their numbers to the numbers to keep. The newest is kept in any case."""


def keep_all() -> Retention:
    """Keeps all checkpoints."""
    return _all


def keeps_all(retention: Retention) -> bool:
    """Whether ``retention`` is ``keep_all()``, for which no checkpoint has to be looked at."""
    return retention is _all


def _all(saved: Sequence[SavedCheckpoint]) -> frozenset[int]:
    return frozenset(entry.number for entry in saved)


def keep_last(count: int) -> Retention:
    """Keeps the ``count`` newest checkpoints.

    Raises:
        CheckpointError: ``count`` is below 1.
    """
    _at_least_one("keep_last", count)
    return lambda saved: frozenset(entry.number for entry in saved[-count:])


def keep_every(step: int) -> Retention:
    """Keeps the checkpoints whose number is a multiple of ``step``.

    Raises:
        CheckpointError: ``step`` is below 1.
    """
    _at_least_one("keep_every", step)
    return lambda saved: frozenset(entry.number for entry in saved if entry.number % step == 0)


def keep_best(metric: str, count: int = 1, *, mode: Literal["min", "max"] = "min") -> Retention:
    """Keeps the ``count`` checkpoints with the smallest (or largest) ``metric`` in their metadata; at a tie the newer.

    Checkpoints without the metric, or with NaN, are never among the best. The metric is looked up under ``"metrics"``
    first; dots in ``metric`` select nested metadata.

    Raises:
        CheckpointError: ``count`` is below 1, or ``mode`` is neither "min" nor "max".
    """
    _at_least_one("keep_best", count)
    if mode not in ("min", "max"):
        raise CheckpointError(f"mode={mode!r}; expected 'min' or 'max'")
    sign = 1 if mode == "min" else -1

    def keep(saved: Sequence[SavedCheckpoint]) -> frozenset[int]:
        scored = [
            (sign * value, -entry.number)
            for entry in saved
            if (value := metric_of(entry.metadata, metric)) is not None and not math.isnan(value)
        ]
        return frozenset(-number for _, number in sorted(scored)[:count])

    return keep


def keep_unmeasured(metric: str) -> Retention:
    """Keeps the checkpoints whose metadata has no ``metric``, because they cannot be ranked by it."""
    return lambda saved: frozenset(entry.number for entry in saved if metric_of(entry.metadata, metric) is None)


def keep_for_run(*, last: int | None = None, every: int | None = None, best: Best | None = None) -> Retention:
    """Keeps the union of the given rules: the newest, every so-many-th, the best. Without a rule, keeps all.

    With ``best`` alone, checkpoints without the metric are kept too, because that rule cannot rank them.

    Raises:
        CheckpointError: a number is below 1.
    """
    rules = [] if last is None else [keep_last(last)]
    rules += [] if every is None else [keep_every(every)]
    if best is not None:
        if not rules:
            rules.append(keep_unmeasured(best.metric))
        rules.append(keep_best(best.metric, best.count, mode=best.mode))
    return keep_union(*rules) if rules else keep_all()


def keep_union(*policies: Retention) -> Retention:
    """Keeps the union of ``policies``: ``keep_union(keep_last(3), keep_every(1000))``."""
    return lambda saved: frozenset[int]().union(*(policy(saved) for policy in policies))


def to_remove(saved: Sequence[SavedCheckpoint], retention: Retention, intact: frozenset[int]) -> list[SavedCheckpoint]:
    """Returns the checkpoints to remove, oldest first; never the newest, nor the newest in ``intact``."""
    ordered = sorted(saved, key=lambda entry: entry.number)
    if not ordered:
        return []
    kept = set(retention(ordered)) | {ordered[-1].number}
    sound = [entry.number for entry in ordered if entry.number in intact]
    kept |= set(sound[-1:])
    return [entry for entry in ordered if entry.number not in kept]


def metrics_of(metadata: Mapping[str, Any]) -> dict[str, float]:
    """Returns the metrics of a checkpoint by name."""
    given = metadata.get(METRICS)
    names = given if isinstance(given, Mapping) else ()
    return {name: value for name in names if (value := metric_of(metadata, name)) is not None}


def metric_of(metadata: Mapping[str, Any], name: str) -> float | None:
    """Returns the number called ``name``, from the metrics or elsewhere in the metadata; None if there is none."""
    for place in (metadata.get(METRICS), metadata):
        value = _found(place, name)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
    return None


def _found(place: Any, name: str) -> Any:
    """Looks up ``name``: a key, or keys joined by dots, which may contain dots themselves."""
    if not isinstance(place, Mapping):
        return None
    if name in place:
        return place[name]
    parts = name.split(".")
    splits = ((".".join(parts[:cut]), ".".join(parts[cut:])) for cut in range(1, len(parts)))
    return next((value for head, rest in splits if (value := _found(place.get(head), rest)) is not None), None)


def _at_least_one(what: str, count: int) -> None:
    if isinstance(count, bool) or not isinstance(count, SupportsIndex):
        raise CheckpointError(f"{what}({count!r}): expected a whole number, 1 or more")
    if count < 1:
        raise CheckpointError(f"{what}({count}) would keep nothing; give 1 or more")

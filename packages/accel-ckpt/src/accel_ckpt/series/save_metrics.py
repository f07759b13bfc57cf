"""Metrics of a checkpoint, checked against the rule for keeping the best checkpoints of its series."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, final

from accel_ckpt.series.retention import METRICS, Best
from accel_state.errors import ConfigError


@final
@dataclass(frozen=True, slots=True)
class SaveMetrics:
    """Arguments of a save beside the state: the user's metadata, metrics by name or None, and the rule for the best."""

    metadata: Mapping[str, Any]
    metrics: Mapping[str, Any] | None
    best: Best | None

    def check(self) -> None:
        """Refuses metadata without names, and metrics that are not numbers or lack the one that ranks checkpoints.

        Raises:
            ConfigError: names the argument, or the metric and the nearest one given.
        """
        if not isinstance(self.metadata, Mapping):
            raise ConfigError(
                f"save_state(metadata={self.metadata!r:.100}): expected JSON values by name, like {{'step': 7}}"
            )
        values = self._values()
        best = self.best
        if best is None or self.metrics is None or best.metric in values:
            return
        near = get_close_matches(best.metric, values, n=1)
        hint = f" (nearest: {near[0]!r})" if near else ""
        raise ConfigError(
            f"save_state(metrics=...) has no {best.metric!r}{hint}, by which the best {best.count} checkpoints "
            f"are kept; it has {', '.join(map(repr, values)) or 'none'}. Give it, or leave metrics out for a "
            "checkpoint that is not compared"
        )

    def warning(self) -> str | None:
        """Reason why this checkpoint cannot be among the best, although the series keeps the best; None if it can."""
        best = self.best
        if best is None:
            return None
        if self.metrics is None:
            return (
                f"save_state without metrics: the checkpoint is not compared with the best {best.count} "
                f"by {best.metric!r}, and stays or goes as if there were none"
            )
        if math.isnan(self._values()[best.metric]):
            return f"the metric {best.metric!r} is nan: the checkpoint is not among the best {best.count}"
        return None

    def document(self) -> dict[str, Any]:
        """Entry of the checkpoint's metadata; empty without metrics."""
        return {} if self.metrics is None else {METRICS: self._values()}

    def _values(self) -> dict[str, float]:
        if self.metrics is None:
            return {}
        if not isinstance(self.metrics, Mapping):
            raise ConfigError(
                f"save_state(metrics={self.metrics!r:.100}): expected numbers by name, like {{'loss': 0.5}}"
            )
        return {name: _number(name, value) for name, value in self.metrics.items()}


def _number(name: Any, value: Any) -> float:
    """Converts a value to a number; tensors and arrays must have one element."""
    if isinstance(name, str) and name and not isinstance(value, str | bool):
        try:
            return float(value)
        except (TypeError, ValueError, RuntimeError, OverflowError):
            pass
    raise ConfigError(
        f"save_state(metrics=...): {name!r} is {value!r:.100}; expected a number under a name, like {{'loss': 0.5}}"
    )

"""Metrics of a checkpoint, checked against the project's rule for keeping the best checkpoints."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, final

from accel_state.errors import ConfigError

if TYPE_CHECKING:
    from accel.setup.kwargs_handlers import ProjectConfiguration


@final
@dataclass(frozen=True, slots=True)
class SaveMetrics:
    """Arguments of ``save_state`` beside the state: the user's metadata, and metrics by name or None."""

    metadata: Mapping[str, Any]
    metrics: Mapping[str, Any] | None
    project: "ProjectConfiguration"

    def check(self) -> None:
        """Refuses metrics that are not numbers, or that lack the metric by which the best checkpoints are kept.

        Raises:
            ConfigError: names the metric, and the nearest one given.
        """
        values = self._values()
        name = self.project.metric
        if self.project.keep_best is None or self.metrics is None or name is None or name in values:
            return
        near = get_close_matches(name, values, n=1)
        hint = f" (nearest: {near[0]!r})" if near else ""
        raise ConfigError(
            f"save_state(metrics=...) has no {name!r}{hint}, by which the best {self.project.keep_best} checkpoints "
            f"are kept; it has {', '.join(map(repr, values)) or 'none'}. Give it, or leave metrics out for a "
            "checkpoint that is not compared"
        )

    def warning(self) -> str | None:
        """Reason why this checkpoint cannot be among the best, although the project keeps the best; None if it can."""
        name = self.project.metric
        if self.project.keep_best is None or name is None:
            return None
        if self.metrics is None:
            return (
                f"save_state without metrics: the checkpoint is not compared with the best {self.project.keep_best} "
                f"by {name!r}, and stays or goes as if there were none"
            )
        if math.isnan(self._values()[name]):
            return f"the metric {name!r} is nan: the checkpoint is not among the best {self.project.keep_best}"
        return None

    def document(self) -> dict[str, Any]:
        """Entry of the checkpoint's metadata; empty without metrics."""
        from accel_ckpt.series.retention import METRICS

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
        except (TypeError, ValueError, RuntimeError):
            pass
    raise ConfigError(
        f"save_state(metrics=...): {name!r} is {value!r:.100}; expected a number under a name, like {{'loss': 0.5}}"
    )

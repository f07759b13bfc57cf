"""Loss check: compares a loss with the losses before it, and describes an anomaly."""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal, final

Kind = Literal["nonfinite", "spike"]
KINDS: tuple[Kind, ...] = ("nonfinite", "spike")


@final
@dataclass(frozen=True, slots=True)
class Trouble:
    """Anomaly of a loss: nan, inf, or far from the losses before it.

    Attributes:
        kind: ``"nonfinite"`` or ``"spike"``.
        step: the optimizer step at which it was seen.
        loss: its value.
        usual: median of the losses before.
        parameters: for a non-finite loss, the parameters whose gradients hold nan or inf; for a spike, those whose
            gradients have grown most; empty if there are none, or if gradients are not available.
        epoch: epoch of the samples.
        samples: positions of the step's samples of all ranks in that epoch's order: first, and one past the last.
        rank: the rank whose loss it is.
    """

    kind: Kind
    step: int
    loss: float
    usual: float
    parameters: str = ""
    epoch: int | None = None
    samples: tuple[int, int] | None = None
    rank: int = 0

    def __str__(self) -> str:
        whose = f" on rank {self.rank}" if self.rank else ""
        what = f"loss {self.loss:.4g} at step {self.step}{whose}, usually {self.usual:.4g}"
        where = f"; samples {self.samples[0]} to {self.samples[1] - 1} of epoch {self.epoch}" if self.samples else ""
        which = "gradients that are not finite" if self.kind == "nonfinite" else "gradients that grew most"
        return what + where + (f"; {which}: {self.parameters}" if self.parameters else "")


@final
class LossWatch:
    """Compares each loss with the last ``window``: a spike exceeds their median by ``times`` the usual distance.

    The usual distance is the median absolute deviation from the median, which is robust to a few outliers. No loss is a
    spike before ``window // 4`` losses have been seen, and spikes are not added to the window; but ``window // 4``
    spikes in a row become the new window.
    """

    def __init__(self, window: int = 64, times: float = 10.0) -> None:
        self._recent: deque[float] = deque(maxlen=window)
        self._enough = max(4, window // 4)
        self._in_row: list[float] = []
        self._times = times

    def check(self, loss: float) -> tuple[Kind, float] | None:
        """Returns the kind of anomaly of this loss and the median of the losses before; None if there is no anomaly."""
        recent = self._recent
        usual = median(recent) if recent else math.nan
        if not math.isfinite(loss):
            return "nonfinite", usual
        if len(recent) >= self._enough:
            distance = median(abs(one - usual) for one in recent)
            if loss - usual > self._times * max(distance, 1e-3 * abs(usual)):
                self._in_row.append(loss)
                if len(self._in_row) >= self._enough:
                    recent.clear()
                    recent.extend(self._in_row)
                    self._in_row.clear()
                return "spike", usual
        self._in_row.clear()
        recent.append(loss)
        return None


def worst_of_others(troubles: Sequence[Trouble]) -> list[Trouble]:
    """The worst anomaly of each step at which rank 0 saw none, because rank 0 reports its own anomalies itself."""
    own = {trouble.step for trouble in troubles if trouble.rank == 0}
    worst: dict[int, Trouble] = {}
    for trouble in sorted(troubles, key=lambda one: (one.kind != "nonfinite", -one.loss, one.rank)):
        if trouble.step not in own:
            worst.setdefault(trouble.step, trouble)
    return [worst[step] for step in sorted(worst)]

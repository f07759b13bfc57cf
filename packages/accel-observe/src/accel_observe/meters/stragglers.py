"""Stragglers: ranks that delay the others, and the phase in which they do."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import final

from accel_observe.meters.phases import COMMUNICATION


@final
@dataclass(frozen=True, slots=True)
class Straggler:
    """A rank that takes longer in one phase than the others: its seconds a step, and the others' median."""

    rank: int
    phase: str
    seconds: float
    usual: float

    def __str__(self) -> str:
        return (
            f"rank {self.rank} takes {self.seconds * 1e3:.0f} ms a step for {self.phase}, the others "
            f"{self.usual * 1e3:.0f} ms"
        )


def find_stragglers(
    seconds: Sequence[Mapping[str, float]], *, steps: int, slower: float = 1.5, at_least: float = 0.01
) -> tuple[Straggler, ...]:
    """Compares the time of every rank in each phase over the same ``steps``; returns the worst straggler first.

    A straggler takes ``slower`` times as long as the median of the others, and at least ``at_least`` seconds a step
    more.
    Communication is not compared: in that phase, every rank waits for the straggler.
    """
    found = []
    for rank, own in enumerate(seconds):
        for phase, spent in own.items():
            others = [other.get(phase, 0.0) for position, other in enumerate(seconds) if position != rank]
            if phase == COMMUNICATION or not others:
                continue
            usual = median(others)
            if spent > slower * usual and spent - usual > at_least * steps:
                found.append(Straggler(rank, phase, spent / steps, usual / steps))
    return tuple(sorted(found, key=lambda one: one.usual - one.seconds))

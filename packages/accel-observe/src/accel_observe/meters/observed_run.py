"""The run that a meter observes."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, final

if TYPE_CHECKING:
    from torch import nn

    from accel_backends import Backend
    from accel_state.session import Session


class EventLog(Protocol):
    """Interface of a run log: it records events."""

    def event(self, kind: str, step: int | None = None, **facts: Any) -> None: ...


class StepProgress(Protocol):
    """Interface of a run's progress over restarts."""

    steps: int

    def goodput(self, now: float) -> float: ...


@final
@dataclass(frozen=True, slots=True)
class ObservedRun:
    """What a meter reads of a run.

    Attributes:
        optimizers: the users' optimizers.
        progress: optimizer steps that count, over restarts; the meter counts them there.
        log: receives readings and anomalies.
        told_stragglers: rank and phase of the stragglers that earlier meters of the run have reported.
    """

    session: "Session"
    backend: "Backend"
    models: "Sequence[nn.Module]"
    optimizers: Sequence[Any]
    progress: StepProgress
    log: EventLog
    told_stragglers: set[tuple[int, str]] = field(default_factory=set)

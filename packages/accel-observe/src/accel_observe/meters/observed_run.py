"""The run that a meter observes: its objects, its events, and its progress over restarts."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, final

if TYPE_CHECKING:
    from torch import nn

    from accel_backends import Backend
    from accel_observe.meters.phases import PhaseClock
    from accel_observe.tracking.group import RunTracking
    from accel_state.session import Session


@final
class RunLog:
    """Where the parts of an Accelerator record events; an event is dropped while there are no trackers.

    Attributes:
        tracking: trackers of the run, of which the run log is one; None on other processes than the main one.
        phases: clock of the current meter, which counts saving as a phase of its own.
    """

    def __init__(self) -> None:
        self.tracking: RunTracking | None = None
        self.phases: PhaseClock | None = None

    def event(self, kind: str, step: int | None = None, **facts: Any) -> None:
        """Records an event, for ``accel report``."""
        if self.tracking is not None:
            self.tracking.event(kind, step, **facts)

    @contextmanager
    def checkpointing(self, kind: str) -> Iterator[Callable[[object], None]]:
        """Counts the block as saving, and records it as an event of this kind when it is left without an error.

        The function that it yields is to be called with the checkpoint's location.
        """
        started, path = time.perf_counter(), ""

        def tell(location: object) -> None:
            nonlocal path
            path = str(location)

        from accel_observe.meters.phases import SAVE

        with nullcontext() if self.phases is None else self.phases.within(SAVE):
            yield tell
        self.event(kind, path=path, seconds=time.perf_counter() - started)


@final
@dataclass(slots=True)
class RunProgress:
    """Progress of a run over restarts, saved in checkpoints to compute goodput.

    Attributes:
        began: when the run was first started, in seconds since 1970.
        resumed: when this process started or resumed the run.
        productive: seconds of earlier processes that contributed to the checkpoint.
        steps: optimizer steps that count.
    """

    began: float
    resumed: float
    productive: float = 0.0
    steps: int = 0

    @classmethod
    def start(cls) -> "RunProgress":
        """Progress of a run that begins now."""
        now = time.time()
        return cls(now, now)

    def goodput(self, now: float) -> float:
        """Fraction of the time since the first start that was spent on steps that count."""
        return (self.productive + now - self.resumed) / max(now - self.began, 1e-9)

    def save(self) -> dict[str, Any]:
        """State for the checkpoint."""
        now = time.time()
        return asdict(RunProgress(self.began, now, self.productive + now - self.resumed, self.steps))

    def load(self, saved: Mapping[str, Any] | None) -> None:
        """Resumes from a checkpoint; work after it is lost."""
        if saved:
            self.began, self.productive, self.steps = saved["began"], saved["productive"], saved["steps"]
            self.resumed = time.time()


@final
@dataclass(frozen=True, slots=True)
class ObservedRun:
    """What a meter reads of a run.

    Attributes:
        data_shards: number of ranks, or groups of them, that read different samples.
        optimizers: the users' optimizers.
        progress: optimizer steps that count, over restarts; the meter counts them there.
        log: receives readings and anomalies.
        told_stragglers: rank and phase of the stragglers that earlier meters of the run have reported.
    """

    session: "Session"
    data_shards: int
    backend: "Backend"
    models: "Sequence[nn.Module]"
    optimizers: Sequence[Any]
    progress: RunProgress
    log: RunLog
    told_stragglers: set[tuple[int, str]] = field(default_factory=set)

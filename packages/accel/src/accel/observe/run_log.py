"""Run log of an Accelerator: events of the run, and the time that saving takes."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, final

if TYPE_CHECKING:
    from accel_observe.meters.phases import PhaseClock
    from accel_observe.tracking.group import RunTracking


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
        from accel_observe.meters.phases import SAVE

        started, clock, path = time.perf_counter(), self.phases, ""
        before = None if clock is None else clock.enter(SAVE)

        def tell(location: object) -> None:
            nonlocal path
            path = str(location)

        try:
            yield tell
        finally:
            if clock is not None and before is not None:
                clock.enter(before)
        self.event(kind, path=path, seconds=time.perf_counter() - started)

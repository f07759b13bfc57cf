"""All trackers of one run: what is logged goes to each of them in its own time."""

import atexit
import time
import uuid
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any, final

from accel_observe.tracking.base import GeneralTracker
from accel_observe.tracking.delivery_queue import STATE, DeliveryQueue, QueueOptions
from accel_observe.tracking.log_notices import Notices
from accel_observe.tracking.run_log import OWN_ID, TIME, RunLogTracker
from accel_observe.tracking.spool import SpooledCall
from accel_observe.tracking.values import snapshot

RUN, LOGGED, LANES = "run", "logged", "lanes"
_NOTHING: dict[str, Any] = {}


def new_run_id() -> str:
    """A name for a run that no other has, and that sorts by time."""
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:6]}"


@final
class RunTracking:
    """Lives on the main process only.

    Attributes:
        run_id: names the run, over all processes that ever work at it.
        lanes: the trackers' ways, in the order in which they were asked for.
    """

    def __init__(self, project: str, folder: Path | None, *, run_id: str, options: QueueOptions) -> None:
        self.run_id = run_id
        self.lanes: list[DeliveryQueue] = []
        self._options = options
        self._project_folder = None if folder is None else folder / project
        self._logged: dict[str, int] = {}
        self._own: DeliveryQueue | None = None
        self._notices: Notices | None = None
        # At the end of the process what is queued is still delivered; a run without references is not kept for that.
        _at_exit(weakref.WeakMethod(self.finish))

    @property
    def folder(self) -> Path | None:
        """Where this run's own files are; None without a folder for logs."""
        return None if self._project_folder is None else self._project_folder / self.run_id

    def add(self, tracker: GeneralTracker, configuration: dict[str, Any] | None) -> None:
        """Takes a tracker in; it is started with the first thing that it is to be given."""
        lane = DeliveryQueue(tracker, self._options, lambda: self.folder)
        lane.configuration = configuration
        self.lanes.append(lane)
        if isinstance(tracker, RunLogTracker):
            self._own = lane
            note = weakref.WeakMethod(self.event)
            self._notices = Notices(lambda *args, **facts: (call := note()) and call(*args, **facts))
            self._notices.open()

    @property
    def trackers(self) -> list[GeneralTracker]:
        """The trackers in the order in which they were asked for."""
        return [lane.tracker for lane in self.lanes]

    def log(self, values: Mapping[str, Any], step: int | None, log_kwargs: Mapping[str, dict[str, Any]]) -> None:
        """Queues numbers and texts for every tracker."""
        kept = {name: value if type(value) is float else snapshot(value) for name, value in values.items()}
        if step is not None:
            self._logged.update(dict.fromkeys(kept, step))
        for lane in self.lanes:
            own = lane is self._own
            lane.put(
                SpooledCall("log", kept, step, {TIME: time.time()} if own else log_kwargs.get(lane.name, _NOTHING))
            )

    def call(
        self, method: str, values: Any, step: int | None, kwargs: Mapping[str, Any], log_kwargs: Mapping[str, Any]
    ) -> None:
        """Queues images, a table or an artifact for the trackers that take such."""
        for lane in self.lanes:
            if getattr(type(lane.tracker), method) is not getattr(GeneralTracker, method):
                own = log_kwargs.get(lane.name, {})
                lane.put(SpooledCall(method, values, step, {**kwargs, **own}))

    def event(self, kind: str, step: int | None = None, **facts: Any) -> None:
        """Notes in the run's own log that something happened, if it has one."""
        if self._own is not None:
            self._own.put(SpooledCall("event", kind, step, {TIME: time.time(), **facts}))

    def lane_of(self, name: str) -> DeliveryQueue | None:
        """The way of the tracker ``name``."""
        return next((lane for lane in self.lanes if lane.name == name), None)

    def state_dict(self) -> dict[str, Any]:
        """What a later process needs to go on with the run: its id, what was logged, and each tracker's part; JSON."""
        lanes = {lane.name: lane.state_dict() for lane in self.lanes if lane.used}
        return {RUN: self.run_id, LOGGED: dict(self._logged), LANES: lanes}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on with a saved run; a tracker that it did not have begins here."""
        self.run_id = str(state[RUN])
        self._logged = dict(state[LOGGED])
        for lane in self.lanes:
            saved = state[LANES].get(lane.name)
            if saved is not None and lane is self._own:
                # Ours is named by the run itself, whether it had begun to write or not.
                saved = {**saved, STATE: {OWN_ID: self.run_id}}
            lane.resume(saved, self._logged)

    def finish(self) -> None:
        """Delivers what is left to every tracker at the same time, and closes them."""
        if self._notices is not None:
            self._notices.close()
        for lane in self.lanes:
            lane.hurry()
        for lane in self.lanes:
            lane.finish()


def _at_exit(finish: "weakref.WeakMethod[Any]") -> None:
    def call() -> None:
        method = finish()
        if method is not None:
            method()

    atexit.register(call)

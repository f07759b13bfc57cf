"""Group of all trackers of one run; each receives the logged values through its own queue."""

import time
import uuid
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any, final

from accel_observe.tracking.base import GeneralTracker
from accel_observe.tracking.delivery_queue import STATE, DeliveryQueue, QueueOptions, call_at_exit
from accel_observe.tracking.log_notices import Notices
from accel_observe.tracking.run_log import OWN_ID, TIME, RunLogTracker
from accel_observe.tracking.spool import SpooledCall
from accel_observe.tracking.values import snapshot

RUN, LOGGED, LANES = "run", "logged", "lanes"
_NOTHING: dict[str, Any] = {}


def new_run_id() -> str:
    """Unique name of a run that sorts by time."""
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:6]}"


@final
class RunTracking:
    """Trackers of a run; exists on the main process only.

    Attributes:
        run_id: name of the run, shared by all processes that resume it.
        lanes: delivery queues of the trackers, in the order in which the trackers were requested.
    """

    def __init__(self, project: str, folder: Path | None, *, run_id: str, options: QueueOptions) -> None:
        self.run_id = run_id
        self.lanes: list[DeliveryQueue] = []
        self._options = options
        self._project_folder = None if folder is None else folder / project
        self._logged: dict[str, int] = {}
        self._own: DeliveryQueue | None = None
        self._notices: Notices | None = None
        call_at_exit(self.finish)

    @property
    def folder(self) -> Path | None:
        """Folder of this run's own files; None without a logging folder."""
        return None if self._project_folder is None else self._project_folder / self.run_id

    def add(self, tracker: GeneralTracker, configuration: dict[str, Any] | None) -> None:
        """Adds a tracker, which starts with its first entry."""
        alike = sum(one.name == str(tracker.name) for one in self.lanes)
        lane = DeliveryQueue(tracker, self._options, lambda: self.folder, number=alike + 1)
        lane.configuration = configuration
        self.lanes.append(lane)
        if isinstance(tracker, RunLogTracker):
            self._own = lane
            note = weakref.WeakMethod(self.event)
            self._notices = Notices(lambda *args, **facts: (call := note()) and call(*args, **facts))
            self._notices.open()

    @property
    def trackers(self) -> list[GeneralTracker]:
        """The trackers, in the order in which they were requested."""
        return [lane.tracker for lane in self.lanes]

    def log(self, values: Mapping[str, Any], step: int | None, log_kwargs: Mapping[str, dict[str, Any]]) -> None:
        """Queues numbers and texts for every tracker."""
        kept = {name: value if type(value) is float else snapshot(value) for name, value in values.items()}
        # The run log counts where no step is given, because a resume tells by the step what the checkpoint knew.
        counted = max(self._logged.values(), default=-1) + 1 if step is None else step
        self._logged.update(dict.fromkeys(kept, counted))
        for lane in self.lanes:
            if lane is self._own:
                lane.put(SpooledCall("log", kept, counted, {TIME: time.time()}))
            else:
                lane.put(SpooledCall("log", kept, step, log_kwargs.get(lane.name, _NOTHING)))

    def call(
        self, method: str, values: Any, step: int | None, kwargs: Mapping[str, Any], log_kwargs: Mapping[str, Any]
    ) -> None:
        """Queues images, a table or an artifact for the trackers that record them."""
        for lane in self.lanes:
            if getattr(type(lane.tracker), method) is not getattr(GeneralTracker, method):
                own = log_kwargs.get(lane.name, {})
                lane.put(SpooledCall(method, values, step, {**kwargs, **own}))

    def event(self, kind: str, step: int | None = None, **facts: Any) -> None:
        """Records an event in the run log, if there is one."""
        if self._own is not None:
            self._own.put(SpooledCall("event", kind, step, {TIME: time.time(), **facts}))

    def lane_of(self, name: str) -> DeliveryQueue | None:
        """Delivery queue of the tracker ``name``; of several of one name, the second is ``<name>-2``."""
        return next((lane for lane in self.lanes if lane.key == name), None)

    def state_dict(self) -> dict[str, Any]:
        """State from which a later process resumes the run: id, last logged steps, and each tracker's state; JSON."""
        lanes = {lane.key: lane.state_dict() for lane in self.lanes if lane.used}
        return {RUN: self.run_id, LOGGED: dict(self._logged), LANES: lanes}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resumes a saved run; a tracker that the saved run did not have begins a new run."""
        self.run_id = str(state[RUN])
        self._logged = dict(state[LOGGED])
        for lane in self.lanes:
            saved = state[LANES].get(lane.key)
            if saved is not None and lane is self._own:
                # The run log is identified by the run's id, whether it had begun to write or not.
                saved = {**saved, STATE: {OWN_ID: self.run_id}}
            lane.resume(saved, self._logged)

    def finish(self) -> None:
        """Delivers the remaining entries to all trackers concurrently, and closes the trackers."""
        if self._notices is not None:
            self._notices.close()
        for lane in self.lanes:
            lane.hurry()
        for lane in self.lanes:
            lane.finish()

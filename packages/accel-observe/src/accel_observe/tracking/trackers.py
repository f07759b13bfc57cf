"""Trackers of a run, which exist on the main process and log values of all ranks."""

import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, final

from accel_observe.tracking.values import named_values, plain, snapshot, whole_step
from accel_state.errors import ConfigError

if TYPE_CHECKING:
    from accel_observe.meters.observed_run import RunLog
    from accel_observe.tracking.base import GeneralTracker
    from accel_observe.tracking.delivery_queue import QueueOptions
    from accel_observe.tracking.reductions import Reductions
    from accel_observe.tracking.registry import LogWith
    from accel_state.enums import LoggerType
    from accel_state.session import Session

_LOG = logging.getLogger("accel_observe.tracking")
DEFAULT_FOLDER = "runs"
_START_SECONDS = 120.0


class Project(Protocol):
    """Interface of a project: the folder of its logs, which may be set after the trackers were requested."""

    logging_dir: str | Path | None


@final
class Trackers:
    """Starts trackers, queues logged values, and saves the trackers' state in the checkpoint.

    Args:
        log: receives the trackers when they are started.
        describe: returns a description of the run as plain values, which is recorded before the first logged values.

    Attributes:
        log_with: the requested trackers, by name or as objects.
    """

    def __init__(
        self,
        session: "Session",
        project: Project,
        log: "RunLog",
        log_with: "LogWith",
        describe: Callable[[], Mapping[str, Any]],
    ) -> None:
        from accel_observe.tracking.registry import filter_trackers

        self._session = session
        self._project = project
        self._log = log
        self._describe = describe
        self.log_with: list[LoggerType | str | GeneralTracker] = filter_trackers(log_with, project.logging_dir)
        if log_with and not self.log_with:
            _LOG.warning("log_with=%r was asked for, and no library for it is installed", log_with)
        self._reductions: Reductions | None = None
        self._continued: Mapping[str, Any] | None = None
        self._described = False
        self._warned = False

    @property
    def started(self) -> "list[GeneralTracker]":
        """See ``Accelerator.trackers``."""
        return [] if self._log.tracking is None else self._log.tracking.trackers

    def start(
        self,
        project_name: str,
        config: dict[str, Any] | None,
        init_kwargs: Mapping[str, dict[str, Any]] | None,
        reductions: "Reductions | None",
        queue: "QueueOptions | None",
    ) -> None:
        """See ``Accelerator.init_trackers``."""
        if reductions is not None:
            from accel_observe.tracking.reductions import check_reductions

            check_reductions(reductions)
        self._reductions = reductions
        if not self._session.is_main_process:
            return
        from accel_observe.tracking.delivery_queue import QueueOptions
        from accel_observe.tracking.group import RunTracking, new_run_id

        if self._log.tracking is not None:
            self._log.tracking.finish()
        self._described = False
        logging_dir = self._project.logging_dir
        folder = Path(logging_dir if logging_dir is not None else DEFAULT_FOLDER)
        known = logging_dir is not None or not self.log_with
        tracking = RunTracking(
            project_name, folder if known else None, run_id=new_run_id(), options=queue or QueueOptions()
        )
        given = plain(snapshot(config))  # of now, although a tracker starts with its first entry
        for tracker in self._make_trackers(project_name, folder, tracking.run_id, init_kwargs or {}, own=known):
            tracking.add(tracker, given)
        self._log.tracking = tracking
        continued, self._continued = self._continued, None
        if continued is not None:
            tracking.load_state_dict(continued)

    def _make_trackers(
        self, project: str, folder: Path, run_id: str, init_kwargs: Mapping[str, dict[str, Any]], *, own: bool
    ) -> "list[GeneralTracker]":
        from accel_observe.tracking.base import GeneralTracker
        from accel_observe.tracking.registry import OWN, construct
        from accel_observe.tracking.run_log import RunLogTracker

        made: list[GeneralTracker] = []
        for chosen in self.log_with:
            if isinstance(chosen, GeneralTracker):
                made.append(chosen)
            elif str(chosen) != OWN:
                try:
                    made.append(construct(str(chosen), project, folder, init_kwargs.get(str(chosen), {})))
                except Exception as error:
                    _LOG.warning("tracker %s cannot be made, so the run does without: %s", chosen, error)
        if own or OWN in map(str, self.log_with):
            made.append(RunLogTracker(project, folder, run_id))
        return made

    def log(
        self,
        values: Mapping[str, Any],
        step: int | None,
        log_kwargs: Mapping[str, dict[str, Any]] | None,
        reduce: "Reductions | None",
    ) -> None:
        """See ``Accelerator.log``."""
        values, step = named_values(values), whole_step(step)
        reductions = self._reductions if reduce is None else reduce
        if reductions is not None and self._session.world_size > 1:
            from accel_observe.tracking.reductions import check_reductions, reduced

            if reduce is not None:
                check_reductions(reduce)
            values = reduced(values, reductions, self._session)
        if self._log.tracking is None:
            self.warn_untracked("log keeps nothing")
            return
        if not self._described:
            self._described = True
            self._log.event("described", values=self._describe())
        self._log.tracking.log(values, step, log_kwargs or {})

    def warn_untracked(self, what: str) -> None:
        """Warns once, on the main process, that there are no trackers."""
        if self._session.is_main_process and not self._warned:
            self._warned = True
            _LOG.warning("%s: there are no trackers; call init_trackers first, and log before end_training", what)

    def log_images(
        self, values: Mapping[str, Any], step: int | None, log_kwargs: Mapping[str, dict[str, Any]] | None
    ) -> None:
        """See ``Accelerator.log_images``."""
        if self._log.tracking is not None:
            copies = {name: _copy(images) for name, images in values.items()}
            self._log.tracking.call("log_images", copies, whole_step(step), {}, log_kwargs or {})

    def log_table(
        self,
        table_name: str,
        columns: list[str] | None,
        data: list[list[Any]] | None,
        dataframe: Any,
        step: int | None,
        log_kwargs: Mapping[str, dict[str, Any]] | None,
    ) -> None:
        """See ``Accelerator.log_table``."""
        if data is None and dataframe is None:
            raise ConfigError(f"the table {table_name!r} has no rows; give data=... or dataframe=...")
        if self._log.tracking is not None:
            frame = dataframe.copy() if hasattr(dataframe, "copy") else dataframe
            given = {"columns": columns, "data": _copy_rows(data), "dataframe": frame}
            kwargs = {name: value for name, value in given.items() if value is not None}
            self._log.tracking.call("log_table", table_name, whole_step(step), kwargs, log_kwargs or {})

    def log_artifact(self, local_path: str | os.PathLike[str], artifact_path: str | None) -> None:
        """See ``Accelerator.log_artifact``."""
        if self._log.tracking is not None:
            self._log.tracking.call("log_artifact", os.fspath(local_path), None, {"artifact_path": artifact_path}, {})

    def get_tracker(self, name: str, unwrap: bool) -> Any:
        """See ``Accelerator.get_tracker``."""
        from accel_observe.tracking.base import GeneralTracker, TrackingError

        if self._log.tracking is None:
            self.warn_untracked(f"get_tracker({str(name)!r}) gives a blank tracker, whose calls do nothing")
            return GeneralTracker(_blank=True)
        lane = self._log.tracking.lane_of(str(name))
        if lane is None:
            known = ", ".join(tracker.name for tracker in self.started)
            raise ConfigError(f"{name} is not an available tracker stored inside the `Accelerator`; there are: {known}")
        started = lane.ensure_started(_START_SECONDS)
        if not unwrap:
            return lane.tracker
        if not started:
            raise TrackingError(f"the tracker {name} does not start: {lane.problem}")
        return lane.tracker.tracker

    def state_dict(self) -> dict[str, Any] | None:
        """Identity of the run and the trackers' state, for the checkpoint; None without trackers."""
        return self._continued if self._log.tracking is None else self._log.tracking.state_dict()  # type: ignore[return-value]

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Resumes the trackers' run of a checkpoint, now or when they start; None: the checkpoint had no trackers."""
        if state is None:
            return
        if self._log.tracking is None:
            self._continued = state
        else:
            self._log.tracking.load_state_dict(state)

    def finish(self) -> None:
        """Delivers what is queued, and closes the trackers."""
        if self._log.tracking is not None:
            self._log.tracking.finish()
            self._log.tracking = None


def _copy(images: Any) -> Any:
    """Copies a batch of images: tensors become arrays in host memory."""
    if hasattr(images, "detach"):
        tensor = images.detach()
        return (tensor.float() if tensor.is_floating_point() else tensor).to("cpu", copy=True).numpy()
    if isinstance(images, list | tuple):
        return (list if isinstance(images, list) else tuple)(map(_copy, images))
    return snapshot(images)


def _copy_rows(data: Any) -> Any:
    """Copies the rows of a table, to which the caller may add later; their cells are those of the caller."""
    return [list(row) if isinstance(row, list) else row for row in data] if isinstance(data, list) else data

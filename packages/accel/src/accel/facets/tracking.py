"""Trackers of an Accelerator, which exist on the main process and log values of all ranks."""

import logging
import os
from abc import ABC
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel.setup.kwargs_handlers import ProjectConfiguration
from accel_state.errors import ConfigError

if TYPE_CHECKING:
    from accel_observe.tracking.base import GeneralTracker
    from accel_observe.tracking.delivery_queue import QueueOptions
    from accel_observe.tracking.group import RunTracking
    from accel_observe.tracking.reductions import Reductions
    from accel_observe.tracking.registry import LogWith
    from accel_state.enums import LoggerType
    from accel_state.session import Session

_LOG = logging.getLogger("accel_observe.tracking")
DEFAULT_FOLDER = "runs"
_START_SECONDS = 120.0


class TrackingFacet(ABC):
    """Starts trackers, queues logged values, and saves the trackers' state in the checkpoint."""

    session: "Session"
    project_configuration: ProjectConfiguration
    log_with: "list[LoggerType | str | GeneralTracker]"
    _tracking: "RunTracking | None" = None
    _reductions: "Reductions | None" = None
    _continued: Mapping[str, Any] | None = None
    _run_described: bool = False
    _warned_untracked: bool = False

    def _choose_trackers(self, log_with: "LogWith") -> None:
        from accel_observe.tracking.registry import filter_trackers

        self.log_with = filter_trackers(log_with, self.project_configuration.logging_dir)
        if log_with and not self.log_with:
            _LOG.warning("log_with=%r was asked for, and no library for it is installed", log_with)

    @property
    def trackers(self) -> "list[GeneralTracker]":
        """Trackers of this run; empty on other processes than the main one."""
        return [] if self._tracking is None else self._tracking.trackers

    def init_trackers(
        self,
        project_name: str,
        config: dict[str, Any] | None = None,
        init_kwargs: Mapping[str, dict[str, Any]] | None = None,
        *,
        reductions: "Reductions | None" = None,
        queue: "QueueOptions | None" = None,
    ) -> None:
        """Prepares the trackers of ``log_with`` for the run; each starts with its first logged value.

        The run log is one of them if a logging folder is known, and the only one if ``log_with`` names none. Errors of
        a tracker are reported once and never end the run.

        Args:
            project_name: the project of the run; each library has its own term for it.
            config: settings of the run, in any nesting.
            init_kwargs: arguments for the tracker of each name.
            reductions: reductions over ranks, for every ``log`` (see there).
            queue: options of the delivery to trackers.
        """
        if reductions is not None:
            from accel_observe.tracking.reductions import check_reductions

            check_reductions(reductions)
        self._reductions = reductions
        if not self.session.is_main_process:
            return
        from accel_observe.tracking.delivery_queue import QueueOptions
        from accel_observe.tracking.group import RunTracking, new_run_id

        if self._tracking is not None:
            self._tracking.finish()
        self._run_described = False
        logging_dir = self.project_configuration.logging_dir
        folder = Path(logging_dir if logging_dir is not None else DEFAULT_FOLDER)
        known = logging_dir is not None or not self.log_with
        tracking = RunTracking(
            project_name, folder if known else None, run_id=new_run_id(), options=queue or QueueOptions()
        )
        for tracker in self._make_trackers(project_name, folder, tracking.run_id, init_kwargs or {}, own=known):
            tracking.add(tracker, config)
        self._tracking = tracking
        if self._continued is not None:
            tracking.load_state_dict(self._continued)

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
        step: int | None = None,
        log_kwargs: Mapping[str, dict[str, Any]] | None = None,
        *,
        reduce: "Reductions | None" = None,
    ) -> None:
        """Logs numbers, texts, or nested dicts of them, at a step. Returns at once: trackers receive the values later.

        Tensors of one element are numbers; the call does not wait for a device. ``reduce`` (or ``reductions`` of
        ``init_trackers``) reduces values over ranks: ``"mean"``, ``"sum"``, ``"max"``, ``"min"``, or ``"last"`` for the
        main process's own; one word for all, or by name or pattern. Without it, values logged on other ranks are
        ignored. Before ``init_trackers`` nothing is logged, and a warning is shown once.

        Collective: every rank of the group must call this. Without a reduction, it is local.

        Raises:
            ConfigError: an unknown reduction.
        """
        reductions = self._reductions if reduce is None else reduce
        if reductions is not None and self.session.world_size > 1:
            from accel_observe.tracking.reductions import check_reductions, reduced

            if reduce is not None:
                check_reductions(reduce)
            values = reduced(values, reductions, self.session)
        if self._tracking is None:
            self._warn_untracked("log keeps nothing")
            return
        if not self._run_described:
            self._describe()
        self._tracking.log(values, step, log_kwargs or {})

    def _warn_untracked(self, what: str) -> None:
        if self.session.is_main_process and not self._warned_untracked:
            self._warned_untracked = True
            _LOG.warning("%s: there are no trackers; call init_trackers first, and log before end_training", what)

    def _describe(self) -> None:
        """Describes the prepared objects in the run log, before the first logged values."""
        from accel.observe.explain import explain

        self._run_described = True
        self.log_event("described", values=explain(self).to_dict())  # type: ignore[arg-type]

    def log_images(
        self, values: Mapping[str, Any], step: int | None = None, log_kwargs: Mapping[str, dict[str, Any]] | None = None
    ) -> None:
        """Logs batches of images by name, with the trackers that record images.

        A batch is a tensor or array N x H x W x C, N x C x H x W (1, 3 or 4 channels) or N x H x W, of 8-bit integers
        or floating-point numbers from 0 to 1, or a list of these and of types that the tracker's library accepts (PIL
        images).
        """
        if self._tracking is not None:
            copies = {name: _copy(images) for name, images in values.items()}
            self._tracking.call("log_images", copies, step, {}, log_kwargs or {})

    def log_table(
        self,
        table_name: str,
        columns: list[str] | None = None,
        data: list[list[Any]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
        log_kwargs: Mapping[str, dict[str, Any]] | None = None,
    ) -> None:
        """Logs a table, given by columns and rows or as a data frame, with the trackers that record tables.

        Raises:
            ConfigError: neither rows nor a data frame.
        """
        if data is None and dataframe is None:
            raise ConfigError(f"the table {table_name!r} has no rows; give data=... or dataframe=...")
        if self._tracking is not None:
            given = {"columns": columns, "data": data, "dataframe": dataframe}
            kwargs = {name: value for name, value in given.items() if value is not None}
            self._tracking.call("log_table", table_name, step, kwargs, log_kwargs or {})

    def log_artifact(self, local_path: str | os.PathLike[str], artifact_path: str | None = None) -> None:
        """Stores a file or folder with the run, with the trackers that store files."""
        if self._tracking is not None:
            self._tracking.call("log_artifact", os.fspath(local_path), None, {"artifact_path": artifact_path}, {})

    def log_event(self, kind: str, step: int | None = None, **facts: Any) -> None:
        """Records an event in the run log, for ``accel report``."""
        if self._tracking is not None:
            self._tracking.event(kind, step, **facts)

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """Returns the tracker ``name``, started; with ``unwrap`` its library's own object.

        On other processes, and before ``init_trackers`` with a warning, returns a blank tracker. Calls of its methods
        run at once and on this thread: they block and raise as the library does.

        Raises:
            ConfigError: the run has no such tracker.
            TrackingError: the library's object was requested, and the tracker does not start.
        """
        from accel_observe.tracking.base import GeneralTracker, TrackingError

        if self._tracking is None:
            self._warn_untracked(f"get_tracker({str(name)!r}) gives a blank tracker, whose calls do nothing")
            return GeneralTracker(_blank=True)
        lane = self._tracking.lane_of(str(name))
        if lane is None:
            known = ", ".join(tracker.name for tracker in self.trackers)
            raise ConfigError(f"{name} is not an available tracker stored inside the `Accelerator`; there are: {known}")
        started = lane.ensure_started(_START_SECONDS)
        if not unwrap:
            return lane.tracker
        if not started:
            raise TrackingError(f"the tracker {name} does not start: {lane.problem}")
        return lane.tracker.tracker

    # State in the checkpoint.

    def state_dict_of_trackers(self) -> dict[str, Any] | None:
        """Identity of the run and the trackers' state, for the checkpoint; None without trackers."""
        return self._continued if self._tracking is None else self._tracking.state_dict()  # type: ignore[return-value]

    def continue_trackers(self, state: Mapping[str, Any] | None) -> None:
        """Resumes the trackers' run of a checkpoint; None: the checkpoint had no trackers."""
        if state is None:
            return
        self._continued = state
        if self._tracking is not None:
            self._tracking.load_state_dict(state)

    def _end_tracking(self) -> None:
        if self._tracking is not None:
            self._tracking.finish()
            self._tracking = None


def _copy(images: Any) -> Any:
    """Copies a batch of images: tensors become arrays in host memory."""
    if hasattr(images, "detach"):
        tensor = images.detach()
        return (tensor.float() if tensor.is_floating_point() else tensor).to("cpu", copy=True).numpy()
    return [_copy(image) for image in images] if isinstance(images, list) else images

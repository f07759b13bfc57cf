"""Trackers and observers of an Accelerator, each method delegated to the part that does it."""

import os
from abc import ABC
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.profiler import profile

    from accel.observe.monitor import Monitor
    from accel_observe.meters.health import LossWatch
    from accel_observe.meters.meter import Meter
    from accel_observe.meters.observed_run import RunLog
    from accel_observe.meters.progress import Progress
    from accel_observe.profiling.profiler import ProfileKwargs
    from accel_observe.report.explanation import Explanation
    from accel_observe.tracking.base import GeneralTracker
    from accel_observe.tracking.delivery_queue import QueueOptions
    from accel_observe.tracking.reductions import Reductions
    from accel_observe.tracking.trackers import Trackers
    from accel_state.enums import LoggerType


class ObservationViews(ABC):
    """Records of a run: values that it logs, events, and measurements."""

    _log: "RunLog"
    _trackers: "Trackers"
    _monitor: "Monitor"

    @property
    def trackers(self) -> "list[GeneralTracker]":
        """Trackers of this run; empty on other processes than the main one."""
        return self._trackers.started

    @property
    def log_with(self) -> "list[LoggerType | str | GeneralTracker]":
        """The requested trackers, by name or as objects."""
        return self._trackers.log_with

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
        self._trackers.start(project_name, config, init_kwargs, reductions, queue)

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
        self._trackers.log(values, step, log_kwargs, reduce)

    def log_images(
        self, values: Mapping[str, Any], step: int | None = None, log_kwargs: Mapping[str, dict[str, Any]] | None = None
    ) -> None:
        """Logs batches of images by name, with the trackers that record images.

        A batch is a tensor or array N x H x W x C, N x C x H x W (1, 3 or 4 channels) or N x H x W, of 8-bit integers
        or floating-point numbers from 0 to 1, or a list of these and of types that the tracker's library accepts (PIL
        images).
        """
        self._trackers.log_images(values, step, log_kwargs)

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
        self._trackers.log_table(table_name, columns, data, dataframe, step, log_kwargs)

    def log_artifact(self, local_path: str | os.PathLike[str], artifact_path: str | None = None) -> None:
        """Stores a file or folder with the run, with the trackers that store files."""
        self._trackers.log_artifact(local_path, artifact_path)

    def log_event(self, kind: str, step: int | None = None, **facts: Any) -> None:
        """Records an event in the run log, for ``accel report``."""
        from accel_observe.tracking.values import whole_step

        self._log.event(kind, whole_step(step), **facts)

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """Returns the tracker ``name``, started; with ``unwrap`` its library's own object.

        On other processes, and before ``init_trackers`` with a warning, returns a blank tracker. Calls of its methods
        run at once and on this thread: they block and raise as the library does.

        Raises:
            ConfigError: the run has no such tracker.
            TrackingError: the library's object was requested, and the tracker does not start.
        """
        return self._trackers.get_tracker(name, unwrap)

    def state_dict_of_trackers(self) -> dict[str, Any] | None:
        """Identity of the run and the trackers' state, for the checkpoint; None without trackers."""
        return self._trackers.state_dict()

    def continue_trackers(self, state: Mapping[str, Any] | None) -> None:
        """Resumes the trackers' run of a checkpoint; None: the checkpoint had no trackers."""
        self._trackers.load_state_dict(state)

    def meter(
        self,
        *,
        every: int = 10,
        tokens: Callable[[Any], int] | None = None,
        flops_per_sample: float | None = None,
        peak_flops: float | None = None,
        watch_loss: "LossWatch | bool" = True,
    ) -> "Meter":
        """Measures throughput, time by phase, memory and health from now on; one meter at a time. Call it on all ranks.

        Args:
            every: optimizer steps between two readings.
            tokens: function that returns the number of tokens in a batch of this rank.
            flops_per_sample: operations of one sample, forward and backward (``accel_observe.meters.count_flops``).
            peak_flops: peak FLOP/s of one device; None: looked up by its name.
            watch_loss: definition of an anomalous loss; False: losses are not checked (on an accelerator, a check
                computes the norms of all gradients in each step).
        """
        return self._monitor.meter(
            every=every,
            tokens=tokens,
            flops_per_sample=flops_per_sample,
            peak_flops=peak_flops,
            watch_loss=watch_loss,
        )

    def progress(self, loader: Any, *, description: str = "", seconds: float = 10.0, **options: Any) -> "Progress":
        """Iterates the loader's batches with a progress line on the main rank: a bar, or plain lines every few seconds.

        Iterate it instead of the loader, on all ranks, and call its ``step(loss, lr=...)`` at the end of each step.
        ``options`` are those of ``meter``; the meter is kept from one epoch to the next.
        """
        return self._monitor.progress(loader, description=description, seconds=seconds, options=options)

    def profile(self, profile_handler: "ProfileKwargs | None" = None) -> "AbstractContextManager[profile]":
        """Profiles the block with torch's profiler, and yields the profiler.

        With ``output_trace_dir`` every rank writes ``profile_<rank>.json`` there; after all ranks have, the main rank
        writes a merged trace, and a table of its slowest operators. Without an argument, the ``ProfileKwargs`` of
        ``kwargs_handlers`` apply.

        Collective: every rank of the group must call this.
        """
        return self._monitor.profile(profile_handler)

    def explain(self) -> "Explanation":
        """Explains the choices made for this run, with reasons, and its steps; print the result, or read its fields.

        Computes and communicates nothing; call it after all objects are prepared. Communication of a step must be
        counted during the step (``count_communication``), and is included from then on.
        """
        return self._monitor.explain()

    def count_communication(self) -> "AbstractContextManager[dict[str, dict[str, int]]]":
        """Counts collectives in the block, and the bytes that this rank passes to them, by name of the collective.

        The mapping, ``{"all_reduce": {"calls": 1, "bytes": ...}, ...}``, is filled when the block ends. Collectives
        that the backend issues itself are included, as torch's profiler records them.
        """
        return self._monitor.count_communication()

    def memory_snapshot(self, path: str | Path | None = None, *, count: int = 20) -> AbstractContextManager[None]:
        """On an out-of-memory error in the block, adds the largest tensors to the error, by name if they have one.

        With ``path`` the report is also written to a file (``{rank}`` in it stands for the rank), with the allocator's
        own statistics if there are any. The error is raised unchanged otherwise.
        """
        return self._monitor.memory_snapshot(path, count)

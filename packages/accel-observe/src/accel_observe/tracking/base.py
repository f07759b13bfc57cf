"""Tracker interface, and the saved identity of a tracker's run, which resuming needs."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, ClassVar, final

from accel_state.errors import AccelError


class TrackingError(AccelError, RuntimeError):
    """A tracker that was requested by name cannot be made or reached."""


class IncompleteTrackerError(TrackingError, NotImplementedError):
    """A tracker class lacks a required attribute."""


@final
@dataclass(frozen=True, slots=True)
class Continuation:
    """Saved run to resume: the tracker's state, and the last recorded steps.

    Attributes:
        state: result of ``state_dict`` in the process that saved.
        marks: by name, the last step that had been recorded at the save. Later values are going to be recorded again.
    """

    state: Mapping[str, Any]
    marks: Mapping[str, int] = field(default_factory=dict)

    @property
    def step(self) -> int | None:
        """Largest of the marks; None without marks."""
        return max(self.marks.values(), default=None)


class GeneralTracker:
    """Base class of trackers: subclass it, set ``name`` and ``requires_logging_directory``, override methods below.

    A class needs the attributes ``name`` and ``requires_logging_directory`` and the property ``tracker``. Its
    constructor only stores its arguments; ``start`` opens files and connections. All methods but the constructor are
    called on one thread of the tracker's own, on the main process only. They may raise or block: the run is not
    delayed, and values are kept and delivered again.

    A resumed run calls ``resume`` before ``start``. A tracker that can delete what it wrote after a step does so then;
    a tracker that cannot returns from ``marks`` what it already holds, and does not receive those values again.

    Attributes:
        name: its name in ``log_with`` and ``log_kwargs``.
        requires_logging_directory: the constructor's second argument is a folder, which must be known.
        main_process_only: direct calls of its methods have no effect on other processes.

    Raises:
        IncompleteTrackerError: the class lacks one of the three.
    """

    name: str
    requires_logging_directory: bool
    main_process_only: ClassVar[bool] = True

    def __init__(self, _blank: bool = False) -> None:
        if _blank:
            return
        missing = [f"`{name}`" for name in ("name", "requires_logging_directory") if not hasattr(self, name)]
        if type(self).tracker is GeneralTracker.tracker:
            missing.append("`tracker`")
        if missing:
            raise IncompleteTrackerError(
                f"the tracker {type(self).__name__} lacks {', '.join(missing)}: set `name` and "
                "`requires_logging_directory` on the class, and let the property `tracker` give the library's object"
            )

    @property
    def tracker(self) -> Any:
        """The library's own object, once started; None on a tracker that was not started."""
        return None

    def start(self) -> None:
        """Opens the run. Default: nothing to open."""

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Records the run's configuration, nested as it was given. Default: not recorded."""

    def log(self, values: dict[str, Any], step: int | None, **kwargs: Any) -> None:
        """Records numbers, text or nested dicts of them at a step. Default: not recorded."""

    def log_images(self, values: dict[str, Any], step: int | None, **kwargs: Any) -> None:
        """Records batches of images, in any form that ``values.pictures`` takes. Default: not recorded."""

    def log_table(self, table_name: str, step: int | None, **kwargs: Any) -> None:
        """Records a table given by ``columns`` and ``data``, or by ``dataframe``. Default: not recorded."""

    def log_artifact(self, local_path: str, artifact_path: str | None = None, step: int | None = None) -> None:
        """Stores a file or folder with the run. Default: not stored."""

    def flush(self) -> None:
        """Makes logged values durable; called after every few entries. Default: nothing to do."""

    def finish(self) -> None:
        """Closes the run. Default: nothing to close."""

    def state_dict(self) -> dict[str, Any]:
        """Identity of the run as JSON, once started, for ``resume`` of a later process. Default: empty."""
        return {}

    def resume(self, run: Continuation) -> None:
        """Called before ``start``: makes ``start`` resume this run. Default: ``start`` begins a new run."""

    def enter_run(self, run_id: str) -> None:
        """Called before ``start`` with the name of the run's folder, if the run has one. Default: ignored."""

    def marks(self) -> Mapping[str, int]:
        """Last step of each name that the resumed run already holds; called once, after ``start``. Default: none."""
        return {}


def on_main_process(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates a tracker's method: it does nothing on other processes if the class is ``main_process_only``."""

    @wraps(function)
    def only_there(self: GeneralTracker, *args: Any, **kwargs: Any) -> Any:
        if getattr(self, "main_process_only", False):
            from accel_state.session import current_topology

            if current_topology().rank != 0:
                return None
        return function(self, *args, **kwargs)

    return only_there

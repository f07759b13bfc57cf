"""Trackers: the interface, and the identity of the run that they log to, for resuming it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, ClassVar, final

from accel_state.errors import AccelError


class TrackingError(AccelError, RuntimeError):
    """A tracker cannot be made or reached, and somebody asked for it by name."""


class IncompleteTrackerError(TrackingError, NotImplementedError):
    """A tracker class lacks what every tracker has."""


@final
@dataclass(frozen=True, slots=True)
class Continuation:
    """A run to go on with: what its tracker said of it, and how much of it counts.

    Attributes:
        state: what ``state_dict`` gave in the process that saved.
        marks: by name, the last step that had been recorded when it was saved. What was recorded after them is about
            to be recorded again.
    """

    state: Mapping[str, Any]
    marks: Mapping[str, int] = field(default_factory=dict)

    @property
    def step(self) -> int | None:
        """The last step of all."""
        return max(self.marks.values(), default=None)


class GeneralTracker:
    """Base of every tracker: subclass it, set ``name`` and ``requires_logging_directory``, write what is below.

    A class needs the attributes ``name`` and ``requires_logging_directory`` and the property ``tracker``. Its
    constructor only keeps its arguments; files and connections are opened by ``start``. All methods but the
    constructor are called on one thread of the tracker's own, on the main process only, and may raise and take their
    time: the run is not held up, values are kept and tried again.

    A run that continues calls ``resume`` before ``start``. A tracker that can take back what it wrote after a step
    does so then; one that cannot says in ``marks`` what it holds already, and is not given that again.

    Attributes:
        name: what ``log_with`` and ``log_kwargs`` call it.
        requires_logging_directory: the constructor's second argument is a folder, which has to be known.
        main_process_only: direct calls of its methods count on the main process only.

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
        """The library's own object, once started; None on a blank one."""
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
        """Keeps a file or folder with the run. Default: not kept."""

    def flush(self) -> None:
        """Makes what was logged durable; called after every few entries. Default: it is."""

    def finish(self) -> None:
        """Closes the run. Default: nothing to close."""

    def state_dict(self) -> dict[str, Any]:
        """Which run this is, as JSON, once started: what ``resume`` of a later process needs. Default: nothing."""
        return {}

    def resume(self, run: Continuation) -> None:
        """Called before ``start``: that one goes on with this run. Default: it begins a new one."""

    def enter_run(self, run_id: str) -> None:
        """Called before ``start``, where the run has a folder of its own: the name of that. Default: not needed."""

    def marks(self) -> Mapping[str, int]:
        """By name, the last step that the continued run holds already; asked once, after ``start``. Default: none."""
        return {}


def on_main_process(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates a tracker's method to do nothing on other processes, if its class is ``main_process_only``."""

    @wraps(function)
    def only_there(self: GeneralTracker, *args: Any, **kwargs: Any) -> Any:
        if getattr(self, "main_process_only", False):
            from accel_state.session import current_topology

            if current_topology().rank != 0:
                return None
        return function(self, *args, **kwargs)

    return only_there

"""Options of the process group, the project and the run."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from accel_state.errors import ConfigError

if TYPE_CHECKING:
    from accel_backends import BackendConfig
    from accel_observe.profiling.profiler import ProfileKwargs
    from accel_precision import AutocastKwargs, GradScalerKwargs


@dataclass(frozen=True, slots=True)
class InitProcessGroupKwargs:
    """Options of the process group: backend, rendezvous, and timeout of collectives."""

    backend: str | None = None
    init_method: str | None = None
    timeout: timedelta | None = None


@dataclass(slots=True)
class ProjectConfiguration:
    """Folders of a project, and names and retention of its checkpoints.

    ``logging_dir`` defaults to ``project_dir``. With ``automatic_checkpoint_naming`` the checkpoints of a run are
    ``<project_dir>/checkpoints/checkpoint_<iteration>`` and at most ``total_limit`` of them are kept; ``iteration``
    is the number of the next one. In addition, ``keep_best`` checkpoints are kept, those with the best ``metric`` among
    the ``metrics`` passed to ``save_state``: the smallest, or with ``mode="max"`` the largest. Without ``total_limit``
    the newest is kept beside the best, and so is every checkpoint that was saved without that metric. With
    ``save_on_each_node`` nodes share no disk: the first process of each node writes the files of ``save``, and each
    node keeps a full copy of every ``save_state``, and loads its own.
    """

    project_dir: str | Path | None = None
    logging_dir: str | Path | None = None
    automatic_checkpoint_naming: bool = False
    total_limit: int | None = None
    iteration: int = 0
    save_on_each_node: bool = False
    keep_best: int | None = None
    metric: str | None = None
    mode: Literal["min", "max"] = "min"

    def __post_init__(self) -> None:
        self._check_best()
        if self.total_limit is not None and self.total_limit < 1:
            raise ConfigError(f"total_limit is {self.total_limit}; at least 1 checkpoint has to be kept (None: all)")
        self.set_directories(self.project_dir)

    def _check_best(self) -> None:
        if self.mode not in ("min", "max"):
            raise ConfigError(f"mode is {self.mode!r}; expected 'min' or 'max'")
        if self.keep_best is None:
            if self.metric is not None:
                raise ConfigError(f"metric={self.metric!r} has no effect without keep_best, the number of best to keep")
            return
        if self.keep_best < 1:
            raise ConfigError(f"keep_best is {self.keep_best}; at least 1 checkpoint has to be kept (None: no rule)")
        if not self.metric:
            raise ConfigError(
                f"keep_best={self.keep_best} needs a metric: the name of a number given to save_state(metrics=...)"
            )
        if not self.automatic_checkpoint_naming:
            raise ConfigError(
                f"keep_best={self.keep_best} is about numbered checkpoints; give automatic_checkpoint_naming=True"
            )

    def set_directories(self, project_dir: str | Path | None = None) -> None:
        """Sets the project's folder, and the logging folder to it if that is not set."""
        self.project_dir = project_dir
        if self.logging_dir is None:
            self.logging_dir = project_dir


@dataclass(frozen=True, slots=True)
class Handlers:
    """The ``kwargs_handlers`` of an Accelerator, a field for each kind."""

    process_group: InitProcessGroupKwargs = field(default_factory=InitProcessGroupKwargs)
    backend: "BackendConfig | None" = None
    scaler: "GradScalerKwargs | None" = None
    autocast: "AutocastKwargs | None" = None
    fp8: object | None = None
    profile: "ProfileKwargs | None" = None


def sort_handlers(handlers: Sequence[object] | None) -> Handlers:
    """Sorts handlers into their fields.

    Raises:
        ConfigError: an object that is not a handler, or two of one kind.
    """
    if not handlers:
        return Handlers()
    from accel_backends import BackendConfig
    from accel_observe.profiling.profiler import ProfileKwargs
    from accel_precision import (
        AORecipeKwargs,
        AutocastKwargs,
        FP8RecipeKwargs,
        GradScalerKwargs,
        TERecipeKwargs,
    )

    places: tuple[tuple[str, tuple[type, ...]], ...] = (
        ("process_group", (InitProcessGroupKwargs,)),
        ("backend", (BackendConfig,)),
        ("scaler", (GradScalerKwargs,)),
        ("autocast", (AutocastKwargs,)),
        ("fp8", (AORecipeKwargs, TERecipeKwargs, FP8RecipeKwargs)),
        ("profile", (ProfileKwargs,)),
    )
    found: dict[str, object] = {}
    for handler in handlers:
        name = next((name for name, kinds in places if isinstance(handler, kinds)), None)
        if name is None:
            raise ConfigError(
                f"kwargs_handlers holds a {type(handler).__name__}; it takes {_listed(places)}, one of each at most"
            )
        if name in found:
            raise ConfigError(f"You can only pass one {type(handler).__name__} in kwargs_handlers; got two")
        found[name] = handler
    return Handlers(**found)  # type: ignore[arg-type]


def _listed(places: Iterable[tuple[str, tuple[type, ...]]]) -> str:
    return ", ".join(kind.__name__ for _, kinds in places for kind in kinds)

"""Checkpoints of a project: options, series, locations, and the ranks that save and load them."""

import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, SupportsIndex, final

from accel_state.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from accel_ckpt import Best, CheckpointDirectory, PerNode
    from accel_ckpt.io.storage import Location
    from accel_ckpt.rank_group import Ranks
    from accel_state.session import Session

_LOG = logging.getLogger(__name__)
FOLDER, LATEST = "checkpoints", "latest"


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
        for name in ("iteration", "total_limit", "keep_best"):
            if (value := getattr(self, name)) is not None:
                _check_whole(name, value)
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
        """Sets the project's folder, and the logging folder to it if that is not set.

        Raises:
            ConfigError: one of them is neither text nor a path, or holds a NUL character.
        """
        from accel_ckpt.io.storage import locate

        for name, place in (("project_dir", project_dir), ("logging_dir", self.logging_dir)):
            try:
                _ = place in (None, "") or locate(place)
            except CheckpointError as error:
                raise ConfigError(f"{name}: {error}") from error
        self.project_dir = project_dir
        if self.logging_dir is None:
            self.logging_dir = project_dir


@final
class ProjectCheckpoints:
    """Locations of a project's checkpoints, numbered automatically or given by the caller.

    A relative folder of the project is that of the working directory at construction.
    """

    def __init__(self, session: "Session", project: "ProjectConfiguration") -> None:
        self._session = session
        self._project = project
        self._working_directory = None if project.project_dir is None else Path.cwd()
        self._nodes: PerNode | None = None
        self._swept = False
        self._saved: int | None = None
        """Number of this run's last automatic checkpoint; None if it has saved none since it loaded one."""

    @property
    def keeps_copies(self) -> bool:
        """Whether each of several nodes keeps a copy of every checkpoint."""
        return self._project.save_on_each_node and self._session.topology.num_nodes > 1

    @property
    def best(self) -> "Best | None":
        """Rule for the best checkpoints; None: none is kept because of its metrics."""
        project = self._project
        if project.keep_best is None or project.metric is None:
            return None
        from accel_ckpt import Best

        return Best(project.metric, project.keep_best, project.mode)

    def ranks(self) -> "Ranks":
        """The ranks that save and load together, and their disks.

        Collective: every rank of the group must call this. Later calls are local.
        """
        if not self.keeps_copies:
            return self._session.live_group()
        if self._nodes is None:
            from accel_ckpt import PerNode

            self._nodes = PerNode(self._session.live_group(), node=self._session.topology.node_rank)
        return self._nodes

    def series(self) -> "CheckpointDirectory | None":
        """Series of the project's automatic checkpoints; None without automatic naming."""
        project = self._project
        if not project.automatic_checkpoint_naming:
            return None
        if project.project_dir is None:
            raise ConfigError("automatic_checkpoint_naming needs a project_dir to put the checkpoints in")
        from accel_ckpt import CheckpointDirectory, keep_for_run
        from accel_ckpt.io.storage import locate

        retention = keep_for_run(last=project.total_limit, best=self.best)
        folder = locate(project.project_dir or ".", base=self._working_directory) / FOLDER
        return CheckpointDirectory(folder, retention=retention, group=self.ranks())

    def next(
        self, output_dir: str | os.PathLike[str] | None, *, alone: bool
    ) -> "tuple[CheckpointDirectory | None, Location]":
        """Location of the next save: the next free number of the series, if there is one, or the given location."""
        series = self.series()
        if series is None:
            assert output_dir is not None
            from accel_ckpt.io.storage import locate

            return None, locate(output_dir)
        if alone:
            series = series.alone()
        if not self._swept:
            self._swept = True
            for leftover in series.sweep():
                _LOG.info("removed what a killed save had left: %s", leftover)
        path = series.next_path(at_least=self._project.iteration)
        if self._saved is not None and self._session.is_main_process:
            newest = (_number(path) or 0) - 1
            if newest > max(self._saved, self._project.iteration - 1):
                _LOG.warning(
                    "another run has saved checkpoint_%d in %s since this one saved checkpoint_%d: resuming takes the "
                    "last of both, and total_limit counts those of both; give each run a project_dir of its own",
                    *(newest, series.path, self._saved),
                )
        return series, path

    def given(self, input_dir: str | os.PathLike[str] | None) -> "Location | None":
        """Location of the checkpoint to load; None: the newest intact one of the series.

        ``"latest"`` means the newest one too; without automatic naming it may be the name of a folder.

        Raises:
            ConfigError: the newest one is asked for, and there is no series.
        """
        from accel_ckpt.io.storage import is_folder, locate, storage_of

        place = None if input_dir is None else locate(input_dir)
        if place is not None and (
            os.fspath(input_dir or "") != LATEST
            or (not self._project.automatic_checkpoint_naming and is_folder(storage_of(place), place))
        ):
            return place
        if self.series() is None:
            raise ConfigError(
                "No input_dir provided and automatic checkpoint naming is disabled; give the checkpoint's folder"
            )
        return None

    def continue_after(self, path: "Location", *, saved: bool) -> None:
        """Sets the number of the next automatic checkpoint to follow the one that was ``saved`` or, if not, loaded."""
        number = _number(path)
        if self._project.automatic_checkpoint_naming and number is not None:
            self._project.iteration, self._saved = number + 1, number if saved else None


def _number(path: "Location") -> int | None:
    from accel_ckpt.series.directory import number_of

    return number_of(path.name)


def _check_whole(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        raise ConfigError(f"{name} is {value!r}; expected a whole number")

"""Tracker of ClearML."""

import json
import os
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, final

from accel_observe.tracking.base import Continuation, GeneralTracker
from accel_observe.tracking.values import as_json, flatten, pictures

_SERIES = ("eval", "test", "train")
_DEFAULT = "train"


@final
class ClearMLTracker(GeneralTracker):
    """Reports to the script's task, or to a task of the project ``run_name``; ``kwargs`` are passed to ``Task.init``.

    ``CLEARML_PROJECT`` and ``CLEARML_TASK`` override the arguments. A name such as ``eval_loss`` becomes the series
    ``eval`` of ``loss``; without a prefix the series is ``train``. A resumed run keeps its task, and values that the
    task already holds are not reported again.

    Raises:
        ValueError: a table without data and without a data frame.
    """

    name = "clearml"
    requires_logging_directory = False

    def __init__(self, run_name: str | None = None, **kwargs: Any) -> None:
        super().__init__()
        self.user_provided_run_name = run_name
        self._options = dict(kwargs)
        self._found = False
        self.task: Any = None

    @property
    def tracker(self) -> Any:
        """The task."""
        return self.task

    def start(self) -> None:
        task_class = import_module("clearml").Task
        current = task_class.current_task()
        self._found = current is not None
        if current is not None:
            self.task = current
            return
        options = dict(self._options)
        options.setdefault("project_name", os.environ.get("CLEARML_PROJECT", self.user_provided_run_name))
        options.setdefault("task_name", os.environ.get("CLEARML_TASK", self.user_provided_run_name))
        self.task = task_class.init(**options)

    def state_dict(self) -> dict[str, Any]:
        return {"task_id": self.task.id}

    def resume(self, run: Continuation) -> None:
        if "task_id" in run.state:
            # ClearML adds this number to our steps; with True instead of 0 it would add the last earlier step.
            self._options.update(reuse_last_task_id=run.state["task_id"], continue_last_task=0)

    def marks(self) -> Mapping[str, int]:
        last: dict[str, int] = {}
        for title, series, step in _reported(self.task):
            for name in (f"{series}_{title}", *([title] if series == _DEFAULT else ())):
                last[name] = max(step, last.get(name, step))
        return last

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.task.connect_configuration(as_json(values))

    def log(self, values: dict[str, Any], step: int | None, **kwargs: Any) -> None:
        logger = self.task.get_logger()
        for name, value in flatten(values):
            if not isinstance(value, int | float):
                continue
            if step is None:
                logger.report_single_value(name=name, value=value, **kwargs)
            else:
                title, series = title_and_series(name)
                logger.report_scalar(title=title, series=series, value=value, iteration=step, **kwargs)

    def log_images(self, values: dict[str, Any], step: int | None, **kwargs: Any) -> None:
        logger = self.task.get_logger()
        for name, images in values.items():
            title, series = title_and_series(name)
            for number, image in enumerate(pictures(images)):
                place = f"{series} {number}" if number else series  # one image for each name, step and series
                logger.report_image(title=title, series=place, iteration=step, image=image, **kwargs)

    def log_table(self, table_name: str, step: int | None, **kwargs: Any) -> None:
        columns, data, frame = (kwargs.pop(key, None) for key in ("columns", "data", "dataframe"))
        if frame is None:
            if data is None:
                raise ValueError("`ClearMLTracker.log_table` needs `data` or `dataframe`")
            frame = [list(columns), *data] if columns is not None else data
        title, series = title_and_series(table_name)
        self.task.get_logger().report_table(title=title, series=series, table_plot=frame, iteration=step, **kwargs)

    def log_artifact(self, local_path: str, artifact_path: str | None = None, step: int | None = None) -> None:
        self.task.upload_artifact(artifact_path or os.path.basename(local_path), artifact_object=local_path)

    def flush(self) -> None:
        self.task.flush()

    def finish(self) -> None:
        if not self._found:
            self.task.close()


def title_and_series(name: str) -> tuple[str, str]:
    """Title and series of a name: ``eval_loss`` is the series ``eval`` of ``loss``."""
    for series in _SERIES:
        prefix = f"{series}_"
        if name.startswith(prefix):
            return name[len(prefix) :], series
    return name, _DEFAULT


def _reported(task: Any) -> Iterator[tuple[str, str, int]]:
    """Title, series and step of every scalar of a task; for an offline task, from the file awaiting upload."""
    if task.is_offline():
        file = Path(task.get_offline_mode_folder()) / "metrics.jsonl"
        for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else ():
            for event in json.loads(line):
                if event["type"] == "training_stats_scalar":
                    yield event["metric"], event["variant"], int(event["iter"])
        return
    for title, all_series in task.get_all_reported_scalars().items():
        for series, points in all_series.items():
            yield from ((title, series, int(step)) for step in points["x"])

"""Tracker of MLflow."""

import json
import logging
import os
import time
from collections.abc import Mapping
from importlib import import_module
from typing import Any, final

from accel_observe.tracking.base import Continuation, GeneralTracker
from accel_observe.tracking.values import as_json, flatten, numbers, pictures

_LOG = logging.getLogger("accel_observe.tracking")
_PARAMETERS_AT_ONCE = 100


@final
class MLflowTracker(GeneralTracker):
    """Logs to an experiment, new or existing, through its own client; does not touch the script's active run.

    The variables ``MLFLOW_EXPERIMENT_NAME``, ``MLFLOW_RUN_ID``, ``MLFLOW_TAGS`` (JSON) and ``MLFLOW_NESTED_RUN``
    override the arguments. A resumed run keeps its id; values that it already holds are not recorded again.
    """

    name = "mlflow"
    requires_logging_directory = False

    def __init__(
        self,
        experiment_name: str | None = None,
        logging_dir: str | os.PathLike[str] | None = None,
        run_id: str | None = None,
        tags: Mapping[str, Any] | str | None = None,
        nested_run: bool = False,
        run_name: str | None = None,
        description: str | None = None,
    ) -> None:
        super().__init__()
        env = os.environ
        self.experiment_name = env.get("MLFLOW_EXPERIMENT_NAME", experiment_name)
        self.logging_dir = None if logging_dir is None else os.fspath(logging_dir)
        self.run_id = env.get("MLFLOW_RUN_ID", run_id)
        given = env.get("MLFLOW_TAGS", tags)
        self._tags: dict[str, Any] = dict((json.loads(given) if isinstance(given, str) else given) or {})
        self._parent = env.get("MLFLOW_NESTED_RUN", str(nested_run)).lower() in {"1", "true", "yes"}
        self.run_name = run_name
        self.description = description
        self._resumed = False
        self._client: Any = None
        self._run: Any = None
        self._dropped: set[str] = set()

    @property
    def tracker(self) -> Any:
        """The run, as ``MlflowClient`` describes it."""
        return self._run

    def start(self) -> None:
        mlflow = import_module("mlflow")
        client = self._client = mlflow.MlflowClient()
        if self.run_id is not None:
            self._run = client.get_run(self.run_id)
            return
        name = self.experiment_name or "Default"
        found = client.get_experiment_by_name(name)
        experiment = (
            found.experiment_id
            if found is not None
            else client.create_experiment(name, artifact_location=self.logging_dir)
        )
        tags = {str(key): str(value) for key, value in self._tags.items()}
        active = mlflow.active_run() if self._parent else None
        if active is not None:
            tags["mlflow.parentRunId"] = active.info.run_id
        if self.description is not None:
            tags["mlflow.note.content"] = self.description
        self._run = client.create_run(experiment, run_name=self.run_name, tags=tags)
        self.run_id = self._run.info.run_id

    def state_dict(self) -> dict[str, Any]:
        return {"run_id": self.run_id}

    def resume(self, run: Continuation) -> None:
        if run.state.get("run_id"):
            self.run_id = str(run.state["run_id"])
            self._resumed = True

    def marks(self) -> Mapping[str, int]:
        names = self._run.data.metrics
        return {
            name: max(metric.step for metric in self._client.get_metric_history(self.run_id, name)) for name in names
        }

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        if self._resumed:
            return
        entities = import_module("mlflow.entities")
        longest = import_module("mlflow.utils.validation").MAX_PARAM_VAL_LENGTH
        parameters = []
        for name, value in flatten(as_json(values), "."):
            if len(str(value)) > longest:
                _LOG.warning("MLflow takes values of %d characters, so the one of %r is left out", longest, name)
            else:
                parameters.append(entities.Param(name, str(value)))
        for first in range(0, len(parameters), _PARAMETERS_AT_ONCE):
            self._client.log_batch(self.run_id, params=parameters[first : first + _PARAMETERS_AT_ONCE])

    def log(self, values: dict[str, Any], step: int | None, **kwargs: Any) -> None:
        entities = import_module("mlflow.entities")
        metrics = numbers(values)
        other = {name for name, _ in flatten(values)} - set(metrics) - self._dropped
        if other:
            self._dropped |= other
            _LOG.warning("MLflow takes numbers only, so %s is left out", ", ".join(sorted(other)))
        now = int(time.time() * 1000)
        batch = [entities.Metric(name, value, now, step or 0) for name, value in metrics.items()]
        self._client.log_batch(self.run_id, metrics=batch, **kwargs)

    def log_images(self, values: dict[str, Any], step: int | None, **kwargs: Any) -> None:
        for name, images in values.items():
            for number, image in enumerate(pictures(images)):
                place = f"{name}/{0 if step is None else step}_{number}.png"
                self._client.log_image(self.run_id, image, artifact_file=place, **kwargs)

    def log_table(self, table_name: str, step: int | None, **kwargs: Any) -> None:
        data = kwargs.get("dataframe")
        if data is None:
            data = {
                str(column): [row[position] for row in kwargs.get("data") or []]
                for position, column in enumerate(kwargs.get("columns") or [])
            }
        self._client.log_dict(self.run_id, as_json(data), f"{table_name}.json")

    def log_figure(self, figure: Any, artifact_file: str, **save_kwargs: Any) -> None:
        """Stores a figure as a file of the run."""
        self._client.log_figure(self.run_id, figure, artifact_file, **save_kwargs)

    def log_artifacts(self, local_dir: str, artifact_path: str | None = None) -> None:
        """Stores a folder with the run."""
        self._client.log_artifacts(self.run_id, local_dir, artifact_path)

    def log_artifact(self, local_path: str, artifact_path: str | None = None, step: int | None = None) -> None:
        keep = self._client.log_artifacts if os.path.isdir(local_path) else self._client.log_artifact
        keep(self.run_id, local_path, artifact_path)

    def finish(self) -> None:
        self._client.set_terminated(self.run_id)

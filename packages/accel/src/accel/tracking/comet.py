"""Comet."""

from importlib import import_module
from typing import Any, final

from accel.tracking.base import Continuation, GeneralTracker
from accel.tracking.values import as_json


@final
class CometMLTracker(GeneralTracker):
    """Logs to the project ``run_name``; ``kwargs`` go to ``comet_ml.start``. Needs comet_ml 3.41 or newer."""

    name = "comet_ml"
    requires_logging_directory = False

    def __init__(self, run_name: str, **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self._options = dict(kwargs)
        self.writer: Any = None

    @property
    def tracker(self) -> Any:
        """The experiment."""
        return self.writer

    def start(self) -> None:
        self.writer = import_module("comet_ml").start(project_name=self.run_name, **self._options)

    def state_dict(self) -> dict[str, Any]:
        return {"experiment_key": self.writer.get_key()}

    def resume(self, run: Continuation) -> None:
        if "experiment_key" in run.state:
            self._options.update(experiment_key=run.state["experiment_key"], mode="get_or_create")

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.writer.log_parameters(as_json(values))

    def log(self, values: dict[str, Any], step: int | None, **kwargs: Any) -> None:
        if step is not None:
            self.writer.set_step(step)
        for name, value in values.items():
            if isinstance(value, int | float):
                self.writer.log_metric(name, value, step=step, **kwargs)
            elif isinstance(value, str):
                self.writer.log_other(name, value, **kwargs)
            elif isinstance(value, dict):
                self.writer.log_metrics(value, step=step, **kwargs)

    def log_images(self, values: dict[str, Any], step: int | None, **kwargs: Any) -> None:
        for name, images in values.items():
            for image in images:
                array = image.cpu().numpy() if hasattr(image, "detach") else image
                self.writer.log_image(array, name=name, step=step, **kwargs)

    def log_table(self, table_name: str, step: int | None, **kwargs: Any) -> None:
        data = kwargs.get("data") if kwargs.get("dataframe") is None else kwargs["dataframe"]
        self.writer.log_table(f"{table_name}.csv", tabular_data=data, headers=kwargs.get("columns") or False)

    def log_artifact(self, local_path: str, artifact_path: str | None = None, step: int | None = None) -> None:
        self.writer.log_asset(local_path, file_name=artifact_path, step=step)

    def finish(self) -> None:
        self.writer.end()

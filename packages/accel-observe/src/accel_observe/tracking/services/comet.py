"""Tracker of Comet."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar, final

from accel_observe.tracking.services.run_object import RunTracker
from accel_observe.tracking.values import as_json, flatten, image_of, pictures


@final
class CometMLTracker(RunTracker):
    """Logs to the project ``run_name``; ``kwargs`` are passed to ``comet_ml.start``. Needs comet_ml 3.41 or newer."""

    name = "comet_ml"
    module = "comet_ml"
    identity = "experiment_key"
    continued: ClassVar[Mapping[str, Any]] = MappingProxyType({"mode": "get_or_create"})

    @property
    def writer(self) -> Any:
        """The experiment."""
        return self.run

    def _begin(self, options: Mapping[str, Any]) -> Any:
        return self._library.start(project_name=self.run_name, **options)

    def state_dict(self) -> dict[str, Any]:
        return {self.identity: self.run.get_key()}

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.run.log_parameters(as_json(values))

    def log(self, values: dict[str, Any], step: int | None, **kwargs: Any) -> None:
        if step is not None:
            self.run.set_step(step)
        for name, value in values.items():
            if isinstance(value, int | float):
                self.run.log_metric(name, value, step=step, **kwargs)
            elif isinstance(value, str):
                self.run.log_other(name, value, **kwargs)
            elif isinstance(value, dict):
                self.run.log_metrics(dict(flatten({name: value})), step=step, **kwargs)

    def log_images(self, values: dict[str, Any], step: int | None, **kwargs: Any) -> None:
        for name, images in values.items():
            for image in pictures(images):
                # Comet needs Matplotlib for arrays, rescales them, and only prints its failures; so arrays are
                # converted to images here.
                picture = image_of(image) if hasattr(image, "ndim") else image
                if self.run.log_image(picture, name=name, step=step, **kwargs) is None:
                    raise ValueError(f"Comet does not take the image {name!r} of step {step}; its own message says why")

    def log_table(self, table_name: str, step: int | None, **kwargs: Any) -> None:
        data = kwargs.get("data") if kwargs.get("dataframe") is None else kwargs["dataframe"]
        self.run.log_table(f"{table_name}.csv", tabular_data=data, headers=kwargs.get("columns") or False)

    def log_artifact(self, local_path: str, artifact_path: str | None = None, step: int | None = None) -> None:
        self.run.log_asset(local_path, file_name=artifact_path, step=step)

    def finish(self) -> None:
        self.run.end()

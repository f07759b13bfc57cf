"""Tracker of Weights & Biases."""

from typing import Any, ClassVar, final

from accel_observe.tracking.services.run_object import RunTracker
from accel_observe.tracking.values import as_json, pictures


@final
class WandBTracker(RunTracker):
    """Logs to the project ``run_name``; ``kwargs`` are passed to ``wandb.init``.

    A resumed run keeps its id (``resume="allow"``). The service rejects steps that it already has; offline, values
    recorded after the checkpoint remain in the earlier offline folder.
    """

    name = "wandb"
    main_process_only: ClassVar[bool] = False
    module = "wandb"

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.run.config.update(as_json(values), allow_val_change=True)

    def log_images(self, values: dict[str, Any], step: int | None, **kwargs: Any) -> None:
        for name, images in values.items():
            self.run.log({name: [self._library.Image(image, **kwargs) for image in pictures(images)]}, step=step)

    def log_table(self, table_name: str, step: int | None, **kwargs: Any) -> None:
        options = {key: kwargs.pop(key) for key in ("columns", "data", "dataframe") if key in kwargs}
        self.run.log({table_name: self._library.Table(**options)}, step=step, **kwargs)

    def log_artifact(self, local_path: str, artifact_path: str | None = None, step: int | None = None) -> None:
        self.run.save(local_path, policy="now")

"""Weights & Biases."""

from importlib import import_module
from typing import Any, ClassVar, final

from accel.tracking.base import Continuation, GeneralTracker
from accel.tracking.values import as_json


@final
class WandBTracker(GeneralTracker):
    """Logs to the project ``run_name``; ``kwargs`` go to ``wandb.init``.

    A run that continues keeps its id (``resume="allow"``). The service itself refuses steps that it has; offline, what
    was recorded after the checkpoint is in the earlier offline folder still.
    """

    name = "wandb"
    requires_logging_directory = False
    main_process_only: ClassVar[bool] = False

    def __init__(self, run_name: str, **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self._options = dict(kwargs)
        self.run: Any = None

    @property
    def tracker(self) -> Any:
        """The wandb run."""
        return self.run

    def start(self) -> None:
        self._wandb = import_module("wandb")
        self.run = self._wandb.init(project=self.run_name, **self._options)

    def state_dict(self) -> dict[str, Any]:
        return {"id": self.run.id}

    def resume(self, run: Continuation) -> None:
        if "id" in run.state:
            self._options.update(id=run.state["id"], resume="allow")

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.run.config.update(as_json(values), allow_val_change=True)

    def log(self, values: dict[str, Any], step: int | None, **kwargs: Any) -> None:
        self.run.log(values, step=step, **kwargs)

    def log_images(self, values: dict[str, Any], step: int | None, **kwargs: Any) -> None:
        for name, images in values.items():
            self.run.log({name: [self._wandb.Image(_rows_last(image), **kwargs) for image in images]}, step=step)

    def log_table(self, table_name: str, step: int | None, **kwargs: Any) -> None:
        options = {key: kwargs.pop(key) for key in ("columns", "data", "dataframe") if key in kwargs}
        self.run.log({table_name: self._wandb.Table(**options)}, step=step, **kwargs)

    def log_artifact(self, local_path: str, artifact_path: str | None = None, step: int | None = None) -> None:
        self.run.save(local_path, policy="now")

    def finish(self) -> None:
        self.run.finish()


def _rows_last(image: Any) -> Any:
    """Tensors as arrays; wandb takes those, pictures and figures."""
    return image.cpu().numpy() if hasattr(image, "detach") else image

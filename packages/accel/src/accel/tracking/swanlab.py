"""SwanLab."""

from importlib import import_module
from typing import Any, ClassVar, final

from accel.tracking.base import Continuation, GeneralTracker
from accel.tracking.values import as_json


@final
class SwanLabTracker(GeneralTracker):
    """Logs to the project ``run_name``; ``kwargs`` go to ``swanlab.init``. Nothing is added to the configuration."""

    name = "swanlab"
    requires_logging_directory = False
    main_process_only: ClassVar[bool] = False

    def __init__(self, run_name: str, **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self._options = dict(kwargs)
        self.run: Any = None

    @property
    def tracker(self) -> Any:
        """The swanlab run."""
        return self.run

    def start(self) -> None:
        self._swanlab = import_module("swanlab")
        self.run = self._swanlab.init(project=self.run_name, **self._options)

    def state_dict(self) -> dict[str, Any]:
        identity = getattr(self.run, "id", None)
        return {} if identity is None else {"id": str(identity)}

    def resume(self, run: Continuation) -> None:
        if "id" in run.state:
            self._options.update(id=run.state["id"], resume="allow")

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.run.config.update(as_json(values))

    def log(self, values: dict[str, Any], step: int | None, **kwargs: Any) -> None:
        self.run.log(values, step=step, **kwargs)

    def log_images(self, values: dict[str, Any], step: int | None, **kwargs: Any) -> None:
        for name, images in values.items():
            arrays = [image.cpu().numpy() if hasattr(image, "detach") else image for image in images]
            self.run.log({name: [self._swanlab.Image(array, **kwargs) for array in arrays]}, step=step)

    def finish(self) -> None:
        finish = getattr(self.run, "finish", None) or self._swanlab.finish
        finish()

"""Trackio."""

from importlib import import_module
from typing import Any, ClassVar, final

from accel.tracking.base import Continuation, GeneralTracker
from accel.tracking.values import as_json


@final
class TrackioTracker(GeneralTracker):
    """Logs to the project ``run_name``; ``kwargs`` go to ``trackio.init``. A run that continues keeps its name."""

    name = "trackio"
    requires_logging_directory = False
    main_process_only: ClassVar[bool] = False

    def __init__(self, run_name: str, **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self._options = dict(kwargs)
        self.run: Any = None

    @property
    def tracker(self) -> Any:
        """The trackio run."""
        return self.run

    def start(self) -> None:
        self._trackio = import_module("trackio")
        self.run = self._trackio.init(project=self.run_name, **self._options)

    def state_dict(self) -> dict[str, Any]:
        return {"name": self.run.name}

    def resume(self, run: Continuation) -> None:
        if "name" in run.state:
            self._options.update(name=run.state["name"], resume="allow")

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.run.config.update(as_json(values))

    def log(self, values: dict[str, Any], step: int | None, **kwargs: Any) -> None:
        self.run.log(values, step=step, **kwargs)

    def log_images(self, values: dict[str, Any], step: int | None, **kwargs: Any) -> None:
        for name, images in values.items():
            arrays = [image.cpu().numpy() if hasattr(image, "detach") else image for image in images]
            for array in arrays:
                self.run.log({name: self._trackio.Image(array, **kwargs)}, step=step)

    def log_table(self, table_name: str, step: int | None, **kwargs: Any) -> None:
        frame = kwargs.get("dataframe")
        if frame is None:
            frame = import_module("pandas").DataFrame(kwargs.get("data"), columns=kwargs.get("columns"))
        self.run.log({table_name: self._trackio.Table(dataframe=frame)}, step=step)

    def finish(self) -> None:
        self.run.finish()

"""Trackio."""

from importlib import import_module
from typing import Any, ClassVar, final

from accel.tracking.runs import RunTracker
from accel.tracking.values import as_array


@final
class TrackioTracker(RunTracker):
    """Logs to the project ``run_name``; ``kwargs`` go to ``trackio.init``. A run that continues keeps its name."""

    name = "trackio"
    main_process_only: ClassVar[bool] = False
    module = "trackio"
    identity = "name"

    def log_images(self, values: dict[str, Any], step: int | None, **kwargs: Any) -> None:
        for name, images in values.items():
            for image in images:
                self.run.log({name: self._library.Image(as_array(image), **kwargs)}, step=step)

    def log_table(self, table_name: str, step: int | None, **kwargs: Any) -> None:
        frame = kwargs.get("dataframe")
        if frame is None:
            frame = import_module("pandas").DataFrame(kwargs.get("data"), columns=kwargs.get("columns"))
        self.run.log({table_name: self._library.Table(dataframe=frame)}, step=step)

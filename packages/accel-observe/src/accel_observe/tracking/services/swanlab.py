"""Tracker of SwanLab."""

from typing import Any, ClassVar, final

from accel_observe.tracking.services.run_object import RunTracker
from accel_observe.tracking.values import pictures


@final
class SwanLabTracker(RunTracker):
    """Logs to the project ``run_name``; ``kwargs`` are passed to ``swanlab.init``. The configuration is unchanged."""

    name = "swanlab"
    main_process_only: ClassVar[bool] = False
    module = "swanlab"

    def log_images(self, values: dict[str, Any], step: int | None, **kwargs: Any) -> None:
        for name, images in values.items():
            self.run.log({name: [self._library.Image(image, **kwargs) for image in pictures(images)]}, step=step)

    def finish(self) -> None:
        finish = getattr(self.run, "finish", None) or self._library.finish
        finish()

"""DVCLive."""

from importlib import import_module
from typing import Any, final

from accel.tracking.base import Continuation, GeneralTracker
from accel.tracking.values import as_array, as_json, flatten


@final
class DVCLiveTracker(GeneralTracker):
    """Writes to ``live``, or to a ``dvclive.Live`` made of ``kwargs``; it has no use for a run's name."""

    name = "dvclive"
    requires_logging_directory = False

    def __init__(self, run_name: str | None = None, live: Any = None, **kwargs: Any) -> None:
        super().__init__()
        self._options = dict(kwargs)
        self.live = live

    @property
    def tracker(self) -> Any:
        """The ``Live``."""
        return self.live

    def start(self) -> None:
        if self.live is None:
            self.live = import_module("dvclive").Live(**self._options)

    def resume(self, run: Continuation) -> None:
        self._options["resume"] = True

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.live.log_params(as_json(values))

    def log(self, values: dict[str, Any], step: int | None, **kwargs: Any) -> None:
        if step is not None:
            self.live.step = step
        for name, value in flatten(values):
            if isinstance(value, int | float | str):
                self.live.log_metric(name, value, **kwargs)
        self.live.next_step()

    def log_images(self, values: dict[str, Any], step: int | None, **kwargs: Any) -> None:
        for name, images in values.items():
            for number, image in enumerate(images):
                place = f"{name}_{0 if step is None else step}_{number}.png"
                self.live.log_image(place, as_array(image), **kwargs)

    def log_artifact(self, local_path: str, artifact_path: str | None = None, step: int | None = None) -> None:
        self.live.log_artifact(local_path, name=artifact_path)

    def finish(self) -> None:
        self.live.end()

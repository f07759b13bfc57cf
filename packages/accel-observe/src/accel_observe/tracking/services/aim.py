"""Tracker of Aim."""

import os
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar, final

from accel_observe.tracking.services.run_object import RunTracker
from accel_observe.tracking.values import as_json, flatten


@final
class AimTracker(RunTracker):
    """Logs to the Aim repository at ``logging_dir``, experiment ``run_name``; ``kwargs`` are passed to ``aim.Run``."""

    name = "aim"
    requires_logging_directory = True
    module = "aim"
    identity = "run_hash"
    continued: ClassVar[Mapping[str, Any]] = MappingProxyType({})

    def __init__(self, run_name: str, logging_dir: str | os.PathLike[str] = ".", **kwargs: Any) -> None:
        super().__init__(run_name, **{"repo": os.fspath(logging_dir), "experiment": run_name, **kwargs})

    @property
    def writer(self) -> Any:
        """The ``aim.Run``."""
        return self.run

    def _begin(self, options: Mapping[str, Any]) -> Any:
        return self._library.Run(**options)

    def state_dict(self) -> dict[str, Any]:
        return {self.identity: self.run.hash}

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.run["hparams"] = as_json(values)

    def log(self, values: dict[str, Any], step: int | None, **kwargs: Any) -> None:
        for name, value in flatten(values):
            self.run.track(value, name=name, step=step, **kwargs)

    def log_images(self, values: dict[str, Any], step: int | None, **kwargs: Any) -> None:
        """Logs images, or pairs of an image and its caption; options under ``aim_image`` and ``track``."""
        options = kwargs.get("kwargs") or {}
        for name, value in values.items():
            image, caption = value if isinstance(value, tuple) else (value, "")
            one = self._library.Image(image, caption=caption, **options.get("aim_image", {}))
            self.run.track(one, name=name, step=step, **options.get("track", {}))

    def finish(self) -> None:
        self.run.close()

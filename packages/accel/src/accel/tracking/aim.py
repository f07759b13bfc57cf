"""Aim."""

import os
from importlib import import_module
from typing import Any, final

from accel.tracking.base import Continuation, GeneralTracker
from accel.tracking.values import as_json, flatten


@final
class AimTracker(GeneralTracker):
    """Writes to the Aim repository at ``logging_dir``, experiment ``run_name``; ``kwargs`` go to ``aim.Run``."""

    name = "aim"
    requires_logging_directory = True

    def __init__(self, run_name: str, logging_dir: str | os.PathLike[str] = ".", **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self._options: dict[str, Any] = {"repo": os.fspath(logging_dir), "experiment": run_name, **kwargs}
        self.writer: Any = None

    @property
    def tracker(self) -> Any:
        """The ``aim.Run``."""
        return self.writer

    def start(self) -> None:
        self._aim = import_module("aim")
        self.writer = self._aim.Run(**self._options)

    def state_dict(self) -> dict[str, Any]:
        return {"run_hash": self.writer.hash}

    def resume(self, run: Continuation) -> None:
        if "run_hash" in run.state:
            self._options["run_hash"] = run.state["run_hash"]

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.writer["hparams"] = as_json(values)

    def log(self, values: dict[str, Any], step: int | None, **kwargs: Any) -> None:
        for name, value in flatten(values):
            self.writer.track(value, name=name, step=step, **kwargs)

    def log_images(self, values: dict[str, Any], step: int | None, **kwargs: Any) -> None:
        """Images, or pairs of an image and its caption; options under ``aim_image`` and ``track``."""
        options = kwargs.get("kwargs") or {}
        for name, value in values.items():
            image, caption = value if isinstance(value, tuple) else (value, "")
            one = self._aim.Image(image, caption=caption, **options.get("aim_image", {}))
            self.writer.track(one, name=name, step=step, **options.get("track", {}))

    def finish(self) -> None:
        self.writer.close()

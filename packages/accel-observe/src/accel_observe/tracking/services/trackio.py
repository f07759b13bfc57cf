"""Tracker of Trackio."""

import time
from collections.abc import Mapping
from importlib import import_module
from typing import Any, ClassVar, final

from accel_observe.tracking.services.run_object import RunTracker
from accel_observe.tracking.values import pictures

_QUEUES = ("_queued_logs", "_sending_batch")
_PATIENCE = 5.0


@final
class TrackioTracker(RunTracker):
    """Logs to the project ``run_name``; ``kwargs`` are passed to ``trackio.init``.

    A resumed run keeps its name; values that its local database already holds are not recorded again.
    """

    name = "trackio"
    main_process_only: ClassVar[bool] = False
    module = "trackio"
    identity = "name"

    def marks(self) -> Mapping[str, int]:
        try:
            storage = import_module("trackio.sqlite_storage").SQLiteStorage
            rows = storage.get_logs(self.run_name, self.run.name)
        except (ImportError, AttributeError):  # the location of the rows is not documented
            return {}
        return {name: row["step"] for row in sorted(rows, key=lambda row: int(row["step"])) for name in row}

    def flush(self) -> None:
        """Waits until Trackio's queue is empty: Trackio writes twice a second and has no call that waits."""
        until = time.monotonic() + _PATIENCE
        while any(getattr(self.run, queue, None) for queue in _QUEUES) and time.monotonic() < until:
            time.sleep(0.02)

    def log_images(self, values: dict[str, Any], step: int | None, **kwargs: Any) -> None:
        for name, images in values.items():
            for image in pictures(images):
                self.run.log({name: self._library.Image(image, **kwargs)}, step=step)

    def log_table(self, table_name: str, step: int | None, **kwargs: Any) -> None:
        frame = kwargs.get("dataframe")
        if frame is None:
            frame = import_module("pandas").DataFrame(kwargs.get("data"), columns=kwargs.get("columns"))
        self.run.log({table_name: self._library.Table(dataframe=frame)}, step=step)

"""Tracker of DVCLive."""

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, final

from accel_observe.tracking.base import Continuation, GeneralTracker
from accel_observe.tracking.values import as_json, flatten, pictures


@final
class DVCLiveTracker(GeneralTracker):
    """Logs to ``live``, or to a ``dvclive.Live`` made from ``kwargs``; ``run_name`` is not used.

    A resumed run continues the existing files; values that they already hold are not recorded again.
    """

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

    def marks(self) -> Mapping[str, int]:
        folder = Path(self.live.plots_dir) / "metrics"
        return {
            table.relative_to(folder).with_suffix("").as_posix(): _last_step(table) for table in folder.rglob("*.tsv")
        }

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
            for number, image in enumerate(pictures(images)):
                place = f"{name}_{0 if step is None else step}_{number}.png"
                self.live.log_image(place, image, **kwargs)

    def log_artifact(self, local_path: str, artifact_path: str | None = None, step: int | None = None) -> None:
        self.live.log_artifact(local_path, name=artifact_path)

    def finish(self) -> None:
        self.live.end()


def _last_step(table: Path) -> int:
    """Highest step in a DVCLive table, whose first line names the columns; -1 if the table is empty."""
    head, *rows = table.read_text(encoding="utf-8").splitlines() or [""]
    column = head.split("\t").index("step") if rows else 0
    return max((int(row.split("\t")[column]) for row in rows), default=-1)

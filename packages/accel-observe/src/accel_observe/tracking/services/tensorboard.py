"""Tracker of TensorBoard's event files."""

import os
import time
from importlib import import_module
from pathlib import Path
from typing import Any, final

from accel_observe.tracking.base import Continuation, GeneralTracker
from accel_observe.tracking.values import as_json, flatten, numbers, pictures


@final
class TensorBoardTracker(GeneralTracker):
    """Writes event files to ``<logging_dir>/<run_name>/<run_id>``; ``kwargs`` are passed to ``SummaryWriter``.

    Each run of a project is a run in TensorBoard, and a resumed run is the same one. Outside of an Accelerator with a
    logging folder, runs have no id and are in ``<logging_dir>/<run_name>``.

    The configuration becomes hyperparameters of this run, and the nested file ``<time>/hparams.yml``. A resumed run
    passes TensorBoard the step from which earlier events no longer count (``purge_step``).
    """

    name = "tensorboard"
    requires_logging_directory = True

    def __init__(self, run_name: str, logging_dir: str | os.PathLike[str], **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self.logging_dir = self._project_dir = Path(logging_dir) / run_name
        self._options = dict(kwargs)
        self._purge: int | None = None
        self._resumed = False
        self.writer: Any = None
        self._parts: dict[Path, Any] = {}
        """Writers of nested values by folder."""

    @property
    def tracker(self) -> Any:
        """The ``SummaryWriter``."""
        return self.writer

    def start(self) -> None:
        self.writer, self._parts = self._open(self.logging_dir), {}

    def _open(self, folder: Path) -> Any:
        writer = _library("torch.utils.tensorboard", "tensorboardX").SummaryWriter
        options = {**self._options, **({} if self._purge is None else {"purge_step": self._purge})}
        return writer(str(folder), **options)

    def _part(self, name: str, part: str) -> Any:
        """Writer of one of the nested values of a name, where ``add_scalars`` has it, which knows no ``purge_step``."""
        folder = self.logging_dir / f"{name.replace('/', '_')}_{part}"
        if folder not in self._parts:
            self._parts[folder] = self._open(folder)
        return self._parts[folder]

    def state_dict(self) -> dict[str, Any]:
        return {"run_name": self.run_name}

    def resume(self, run: Continuation) -> None:
        self._resumed = True
        self._purge = 0 if run.step is None else run.step + 1

    def enter_run(self, run_id: str) -> None:
        self.logging_dir = self._project_dir / run_id

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        if self._resumed:
            return
        import yaml

        nested = as_json(values)
        folder = self.logging_dir / str(time.time())
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "hparams.yml").write_text(yaml.safe_dump(nested, sort_keys=False), encoding="utf-8")
        flat = {
            name: value if isinstance(value, bool | int | float | str) else str(value)
            for name, value in flatten(nested)
        }
        hparams = _library("torch.utils.tensorboard.summary", "tensorboardX.summary").hparams
        # ``add_hparams`` would open a second run; these are the same three records, in this run.
        for record in hparams(flat, {}):
            self.writer.file_writer.add_summary(record)
        self.writer.flush()

    def log(self, values: dict[str, Any], step: int | None, **kwargs: Any) -> None:
        for name, value in values.items():
            if isinstance(value, int | float):
                self.writer.add_scalar(name, value, global_step=step, **kwargs)
            elif isinstance(value, str):
                self.writer.add_text(name, value, global_step=step, **kwargs)
            elif isinstance(value, dict):
                for part, number in numbers(value).items():
                    self._part(name, part).add_scalar(name, number, global_step=step, **kwargs)

    def log_images(self, values: dict[str, Any], step: int | None, **kwargs: Any) -> None:
        import numpy

        for name, images in values.items():
            if "dataformats" in kwargs:
                self.writer.add_images(name, images, global_step=step, **kwargs)
            else:
                arrays = [numpy.atleast_3d(numpy.asarray(picture)) for picture in pictures(images)]
                self.writer.add_images(name, numpy.stack(arrays), global_step=step, dataformats="NHWC", **kwargs)

    def flush(self) -> None:
        for writer in (self.writer, *self._parts.values()):
            writer.flush()

    def finish(self) -> None:
        for writer in (self.writer, *self._parts.values()):
            writer.close()


def _library(first: str, second: str) -> Any:
    """torch's writer if tensorboard is installed, otherwise that of tensorboardX."""
    try:
        return import_module(first)
    except ImportError:
        return import_module(second)

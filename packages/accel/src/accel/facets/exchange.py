"""An Accelerator's side towards checkpoints of other libraries: DeepSpeed's own folders, read and written."""

import os
from abc import ABC
from typing import TYPE_CHECKING

from accel_state.errors import ConfigError
from accel_state.watchdog.decorator import recorded

if TYPE_CHECKING:
    from torch import nn

    from accel.optimizer import PreparedOptimizer
    from accel_backends import Backend


class ExchangeFacet(ABC):
    """Takes in and gives out what others write."""

    backend: "Backend"
    _models: "list[nn.Module]"
    _optimizers: "list[PreparedOptimizer]"

    @recorded("import_deepspeed")
    def import_deepspeed(
        self, folder: str | os.PathLike[str], *, tag: str | None = None, model: "nn.Module | None" = None
    ) -> None:
        """Loads a folder that DeepSpeed's ``engine.save_checkpoint`` wrote into a prepared model and its optimizer.

        Whatever the stage and the number of ranks that wrote it, and whatever the backend here. Weights, the
        optimizer's state, the loss scale and counts of steps are taken over; schedules, loaders and random states are
        not in it as they are here. ``save_state`` afterwards is the conversion. Collective; every process reads the
        whole folder.

        Args:
            folder: that ``save_checkpoint`` was given.
            tag: of the checkpoint in it; None: what ``latest`` names.
            model: a prepared one, where there are several.

        Raises:
            CheckpointError: there is no such checkpoint, or not all of it.
            CheckpointMismatchError: it is another model's, or another optimizer's.
        """
        from pathlib import Path

        from accel_deepspeed.checkpoint.zero_folders import read_folder

        position = self._exchanged(model)
        models = [self._models[position]]
        optimizers = [one.optimizer for one in self._optimizers[position : position + 1]]
        groups = [
            group["params"]
            for optimizer in optimizers
            for group in self.backend.optimizer_state(optimizer, models)["param_groups"]
        ]
        found = read_folder(Path(folder), tag, groups=groups or None)
        self.backend.load_model_state(models[0], found.model)
        for optimizer in optimizers:
            if found.optimizer is not None:
                self.backend.load_optimizer_state(optimizer, models, found.optimizer)
        scales = self.backend.loss_scales
        if found.scale is not None and scales:
            scales[min(position, len(scales) - 1)].load_state_dict(found.scale)
        if len(self._models) == 1:
            self.backend.load_counts([found.counts])

    @recorded("export_deepspeed")
    def export_deepspeed(
        self, folder: str | os.PathLike[str], *, tag: str = "accel", model: "nn.Module | None" = None
    ) -> None:
        """Writes a prepared model and its optimizer as DeepSpeed's ``load_checkpoint`` and ``zero_to_fp32`` read it.

        With strategy ``"deepspeed"`` only, whose checkpoints of ``save_state`` load from any other. Collective.

        Raises:
            BackendError: another backend.
        """
        self.backend.export_native(self._models[self._exchanged(model)], os.fspath(folder), tag)

    def _exchanged(self, model: "nn.Module | None") -> int:
        if model is None and len(self._models) == 1:
            return 0
        for position, prepared in enumerate(self._models):
            if prepared is model:
                return position
        raise ConfigError(
            f"a folder of DeepSpeed holds one model, and {len(self._models)} are prepared; give the one that it is of"
        )

"""Import and export of DeepSpeed's own checkpoint folders."""

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
    """Methods that read and write checkpoints of other libraries."""

    backend: "Backend"
    _models: "list[nn.Module]"
    _optimizers: "list[PreparedOptimizer]"

    @recorded("import_deepspeed")
    def import_deepspeed(
        self, folder: str | os.PathLike[str], *, tag: str | None = None, model: "nn.Module | None" = None
    ) -> None:
        """Loads a folder written by DeepSpeed's ``engine.save_checkpoint`` into a prepared model and its optimizer.

        The ZeRO stage and the number of ranks that wrote it, and the backend here, may be any. Weights, the optimizer's
        state, the loss scale and step counts are loaded; schedules, loaders and random states are not, because
        DeepSpeed stores them in another form or not at all. ``save_state`` afterwards completes the conversion. Every
        process reads all files.

        Collective: every rank of the group must call this.

        Args:
            folder: the folder that was passed to ``save_checkpoint``.
            tag: name of the checkpoint in it; None: the name in the file ``latest``.
            model: a prepared model; needed if there are several.

        Raises:
            CheckpointError: there is no such checkpoint, or it is incomplete.
            CheckpointMismatchError: it belongs to another model, or to another optimizer.
        """
        from pathlib import Path

        from accel_deepspeed.checkpoint.zero_folders import read_folder

        position = self._exchanged(model)
        models = [self._models[position]]
        optimizers = [one.optimizer for one in self._optimizers[position : position + 1]]
        groups = [
            group["params"]
            for optimizer in optimizers
            for group in self.backend.states.optimizer(optimizer, models)["param_groups"]
        ]
        found = read_folder(Path(folder), tag, groups=groups or None)
        self.backend.states.load_model(models[0], found.model)
        for optimizer in optimizers:
            if found.optimizer is not None:
                self.backend.states.load_optimizer(optimizer, models, found.optimizer)
        scales = self.backend.states.loss_scales
        if found.scale is not None and scales:
            scales[min(position, len(scales) - 1)].load_state_dict(found.scale)
        if len(self._models) == 1:
            self.backend.states.load_counts([found.counts])

    @recorded("export_deepspeed")
    def export_deepspeed(
        self, folder: str | os.PathLike[str], *, tag: str = "accel", model: "nn.Module | None" = None
    ) -> None:
        """Writes a prepared model and its optimizer for DeepSpeed's ``load_checkpoint`` and ``zero_to_fp32``.

        Only with strategy ``"deepspeed"``; a checkpoint of ``save_state`` from another strategy can be loaded into it
        first.

        Collective: every rank of the group must call this.

        Raises:
            BackendError: another backend.
        """
        from accel_backends.core.native import native
        from accel_deepspeed import DeepSpeedBackend

        engine = native(self.backend, DeepSpeedBackend)
        engine.export_native(self._models[self._exchanged(model)], os.fspath(folder), tag)

    def _exchanged(self, model: "nn.Module | None") -> int:
        if model is None and len(self._models) == 1:
            return 0
        for position, prepared in enumerate(self._models):
            if prepared is model:
                return position
        raise ConfigError(
            f"a folder of DeepSpeed holds one model, and {len(self._models)} are prepared; give the one that it is of"
        )

"""Weights of prepared models: extracted, exported for other tools, and loaded."""

import os
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, final

import torch
from torch import nn

from accel_state.errors import ConfigError
from accel_state.pytree.saved_shapes import is_packed
from accel_state.watchdog.decorator import recorded

if TYPE_CHECKING:
    from accel.prepared import PreparedObjects
    from accel.setup.run_strategy import RunStrategy
    from accel_ckpt.io.storage import Location
    from accel_ckpt.series.project import ProjectConfiguration


@final
class Weights:
    """Passes states of models to accel_ckpt's exports, and loaded weights to the backend."""

    def __init__(self, strategy: "RunStrategy", prepared: "PreparedObjects", project: "ProjectConfiguration") -> None:
        self._strategy = strategy
        self._prepared = prepared
        self._project = project

    def unwrap_model(self, model: nn.Module, *, keep_fp32_wrapper: bool, keep_torch_compile: bool) -> nn.Module:
        """See ``Accelerator.unwrap_model``."""
        backend = self._strategy.backend
        own = backend.unwrap(model, keep_torch_compile=keep_torch_compile)
        if keep_fp32_wrapper:
            return own
        from accel_precision import plain_module

        return plain_module(backend.unwrap(own, keep_torch_compile=False))

    def get_state_dict(self, model: nn.Module, *, unwrap: bool, sharded: bool) -> dict[str, torch.Tensor]:
        """See ``Accelerator.get_state_dict``."""
        if not unwrap:
            return model.state_dict()
        if any("_hf_hook" in part.__dict__ for part in model.modules()):
            from accel_inference import get_state_dict_offloaded_model, has_offloaded_params

            if any(map(has_offloaded_params, model.modules())):
                return get_state_dict_offloaded_model(model)
        from accel_backends.ops.state_dicts import with_aliases

        self._need_all_shards()
        backend = self._strategy.backend
        return with_aliases(model, backend.states.model(model) if sharded else backend.states.full_model(model))

    def full_parameters(self, model: nn.Module, *, writeback: bool) -> AbstractContextManager[None]:
        """See ``Accelerator.full_parameters``."""
        self._need_all_shards()
        return self._strategy.backend.states.full_parameters(model, writeback=writeback)

    def save_model(
        self,
        model: nn.Module,
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str,
        *,
        safe_serialization: bool,
    ) -> "list[Location]":
        """See ``Accelerator.save_model``."""
        from accel_ckpt import export_model

        _refuse_pickle(safe_serialization, "torch.save(accelerator.get_state_dict(model), path)")
        in_parts = bool(self._strategy.backend.states.elsewhere(model))
        state = self.get_state_dict(model, unwrap=True, sharded=not in_parts)
        return export_model(state, save_directory, max_shard_size, group=self._strategy.session.live_group())

    def load_model(self, model: nn.Module, path: str | os.PathLike[str], *, strict: bool) -> None:
        """See ``Accelerator.load_model``."""
        from accel_ckpt import load_model_parts

        backend = self._strategy.backend
        like = {name: one for name, one in backend.states.model(model).items() if not is_packed(name)}
        backend.states.load_model(model, load_model_parts(path, like), strict=strict)

    def save(self, obj: Mapping[str, torch.Tensor], file: str | os.PathLike[str], *, safe_serialization: bool) -> None:
        """See ``Accelerator.save``."""
        from accel_ckpt import export_tensors

        _refuse_pickle(safe_serialization, "torch.save(obj, f) on the main process")
        if not isinstance(obj, Mapping):
            raise ConfigError(
                f"save writes a mapping of names to tensors, not a {type(obj).__qualname__}; what must resume belongs "
                "to register_for_checkpointing and save_state"
            )
        session = self._strategy.session
        if session.is_local_main_process if self._project.save_on_each_node else session.is_main_process:
            export_tensors(obj, file)

    @recorded("import_deepspeed")
    def import_deepspeed(self, folder: str | os.PathLike[str], tag: str | None, model: nn.Module | None) -> None:
        """See ``Accelerator.import_deepspeed``."""
        from accel_deepspeed.checkpoint.zero_folders import read_folder

        backend, known = self._strategy.backend, self._prepared
        model = known.only_model(model)
        optimizers = known.optimizers_of(model)
        groups = [
            group["params"]
            for optimizer in optimizers
            for group in backend.states.optimizer(optimizer, [model])["param_groups"]
        ]
        found = read_folder(Path(folder), tag, groups=groups or None)
        backend.states.load_model(model, found.model)
        for optimizer in optimizers:
            if found.optimizer is not None:
                backend.states.load_optimizer(optimizer, [model], found.optimizer)
        scales = backend.states.loss_scales
        if found.scale is not None and scales:
            # one scale of all models, or one of each model that trains
            trained = [one for one in known.models if known.optimizers_of(one)]
            position = next((n for n, one in enumerate(trained) if one is model), 0)
            scales[min(position, len(scales) - 1)].load_state_dict(found.scale)
        if len(known.models) == 1:
            backend.states.load_counts([found.counts])

    @recorded("export_deepspeed")
    def export_deepspeed(self, folder: str | os.PathLike[str], tag: str, model: nn.Module | None) -> None:
        """See ``Accelerator.export_deepspeed``."""
        from accel_backends.core.native import native
        from accel_deepspeed import DeepSpeedBackend

        engine = native(self._strategy.backend, DeepSpeedBackend)
        engine.export_native(self._prepared.only_model(model), os.fspath(folder), tag)

    def _need_all_shards(self) -> None:
        """Refuses operations that need other ranks' shards of a model after the process group was closed."""
        if self._strategy.backend.capabilities.sharded:
            self._strategy.session.live_group()


def _refuse_pickle(safe_serialization: bool, instead: str) -> None:
    if not safe_serialization:
        raise ConfigError(
            "safe_serialization=False would write a pickle, which runs code when it is read; leave it out to get "
            f"safetensors, or write the pickle yourself: {instead}"
        )

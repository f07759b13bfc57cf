"""Methods of the Accelerator that save and load."""

import logging
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from accel_compat.checkpoints import files
from accel_compat.checkpoints.model_files import save_model_files
from accel_compat.checkpoints.pickles import save
from accel_compat.helpers.models import get_pretty_name
from accel_state.enums import DistributedType

LOG = logging.getLogger("accelerate.accelerator")
_AUTOMATIC = re.compile(r"checkpoint_(\d+)")


def _folders(base: str) -> list[str]:
    """Folders with automatic names, oldest first; others, as one that the user keeps the best weights in, are left out."""
    found = {int(match[1]): name for name in os.listdir(base) if (match := _AUTOMATIC.fullmatch(name))}
    return [os.path.join(base, found[number]) for number in sorted(found)]


class SavingMethods:
    """Checkpoints, weights and registered objects of an Accelerator."""

    def save(self: Any, obj: Any, f: Any, safe_serialization: bool = False) -> None:
        """Writes an object on the main process, or on the first process of each node."""
        save(
            obj,
            f,
            save_on_each_node=self.project_configuration.save_on_each_node,
            safe_serialization=safe_serialization,
        )

    def save_model(
        self: Any,
        model: nn.Module,
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Writes a model as files of other tools: safetensors or torch's, with an index if there are several."""
        if os.path.isfile(save_directory):
            LOG.error("Provided path (%s) should be a directory, not a file", save_directory)
            return
        os.makedirs(save_directory, exist_ok=True)
        from accel_inference import get_state_dict_offloaded_model, has_offloaded_params

        if any(has_offloaded_params(module) for module in model.modules()):
            state = get_state_dict_offloaded_model(model)
        else:
            if any(parameter.device == torch.device("meta") for parameter in model.parameters()):
                raise RuntimeError("You can't save the model since some parameters are on the meta device.")
            state = self.get_state_dict(model)
        if state is not None and (state or self.is_main_process):
            save_model_files(self, state, save_directory, max_shard_size, safe_serialization=safe_serialization)

    def get_state_dict(self: Any, model: nn.Module, unwrap: bool = True) -> Any:
        """Full weights of a model."""
        if self.distributed_type in (DistributedType.FSDP, DistributedType.DEEPSPEED):
            return self._backend.states.full_model(model)
        return (self.unwrap_model(model) if unwrap else model).state_dict()

    def unwrap_model(
        self: Any, model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
    ) -> nn.Module:
        """The user's module in a prepared one."""
        from accel_compat.helpers.unwrap import extract_model_from_parallel

        inner: nn.Module = extract_model_from_parallel(model, keep_fp32_wrapper, keep_torch_compile)
        return inner

    def register_save_state_pre_hook(self: Any, hook: Callable[..., None]) -> Any:
        """Registers ``hook(models, weights, folder)``, which runs before weights are written."""
        handle = torch.utils.hooks.RemovableHandle(self._save_model_state_pre_hook)
        self._save_model_state_pre_hook[handle.id] = hook
        return handle

    def register_load_state_pre_hook(self: Any, hook: Callable[..., None]) -> Any:
        """Registers ``hook(models, folder)``, which runs before weights are loaded."""
        handle = torch.utils.hooks.RemovableHandle(self._load_model_state_pre_hook)
        self._load_model_state_pre_hook[handle.id] = hook
        return handle

    def register_for_checkpointing(self: Any, *objects: Any) -> None:
        """Adds objects whose state is saved and loaded.

        Raises:
            ValueError: an object has no ``state_dict`` or no ``load_state_dict``.
        """
        bad = [
            f"- Item at index {index}, `{get_pretty_name(item)}`"
            for index, item in enumerate(objects)
            if not hasattr(item, "state_dict") or not hasattr(item, "load_state_dict")
        ]
        if bad:
            raise ValueError(
                "All `objects` must include a `state_dict` and `load_state_dict` function to be stored. The following "
                "inputs are invalid:" + "".join(f"\n\t{line}" for line in bad)
            )
        self._custom_objects.extend(objects)

    def save_state(
        self: Any, output_dir: Any = None, safe_serialization: bool = True, **save_model_func_kwargs: Any
    ) -> Path:
        """Writes the run's state in Accelerate's layout, and returns the folder.

        With automatic names the oldest folders beyond ``total_limit`` are removed after the write.

        Raises:
            ValueError: the folder with the next automatic name exists.
        """
        project = self.project_configuration
        base = os.path.join(self.project_dir, "checkpoints") if project.automatic_checkpoint_naming else None
        if base is not None:
            os.makedirs(base, exist_ok=True)
            output_dir = os.path.join(base, f"checkpoint_{self.save_iteration}")
            if os.path.exists(output_dir):
                raise ValueError(
                    f"Checkpoint directory {output_dir} ({self.save_iteration}) already exists. Please manually "
                    "override `self.save_iteration` with what iteration to start with."
                )
            self.wait_for_everyone()
        os.makedirs(output_dir, exist_ok=True)
        weights = self._write_strategy(output_dir, save_model_func_kwargs)
        sharded = self.distributed_type in (DistributedType.FSDP, DistributedType.DEEPSPEED)
        for hook in self._save_model_state_pre_hook.values():
            hook(self._models, weights, output_dir)
        files.save_accelerator_state(
            output_dir,
            weights,
            [] if sharded else self._optimizers,
            self._schedulers,
            self._dataloaders,
            self.process_index,
            self.step,
            self.scaler,
            save_on_each_node=project.save_on_each_node,
            safe_serialization=safe_serialization,
        )
        for index, item in enumerate(self._custom_objects):
            files.save_custom_state(item, output_dir, index, save_on_each_node=project.save_on_each_node)
        project.iteration += 1
        if base is not None and project.total_limit is not None:
            self._prune(base, project.total_limit)
        return Path(output_dir)

    def _prune(self: Any, base: str, limit: int) -> None:
        self.wait_for_everyone()
        if not self.is_main_process:
            return
        folders = _folders(base)
        for folder in folders[: max(0, len(folders) - limit)]:
            LOG.warning("Deleting %s: at most %d checkpoints are kept", folder, limit)
            shutil.rmtree(folder)

    def _write_strategy(self: Any, output_dir: str, options: dict[str, Any]) -> list[Any]:
        """Writes the weights and optimizers that a sharding strategy has files for; returns the other weights."""
        if self.distributed_type == DistributedType.DEEPSPEED:
            for index, engine in enumerate(self._models):
                engine.save_checkpoint(output_dir, files.MODEL if index == 0 else f"{files.MODEL}_{index}", **options)
            return []
        if self.distributed_type == DistributedType.FSDP:
            from accel_compat.checkpoints.sharded import save_fsdp_model, save_fsdp_optimizer

            plugin = self.state.fsdp_plugin
            for index, model in enumerate(self._models):
                save_fsdp_model(plugin, self, model, output_dir, index)
            for index, optimizer in enumerate(self._optimizers):
                save_fsdp_optimizer(plugin, self, optimizer, self._models[index], output_dir, index)
            return []
        return [self.get_state_dict(model, unwrap=False) for model in self._models]

    def load_state(
        self: Any, input_dir: Any = None, load_kwargs: dict[str, Any] | None = None, **load_model_func_kwargs: Any
    ) -> None:
        """Loads a state in Accelerate's layout.

        Raises:
            ValueError: there is no such folder.
            RuntimeError: another number of objects is registered than was saved.
        """
        input_dir = self._found(input_dir)
        models = self._read_strategy(input_dir, load_model_func_kwargs)
        sharded = self.distributed_type in (DistributedType.FSDP, DistributedType.DEEPSPEED)
        for hook in self._load_model_state_pre_hook.values():
            hook(models, input_dir)
        map_location = load_model_func_kwargs.pop("map_location", None)
        if map_location is None:
            map_location = "on_device" if self.num_processes > 1 and self.multi_device else "cpu"
        kept = files.load_accelerator_state(
            input_dir,
            models,
            [] if sharded else self._optimizers,
            self._schedulers,
            self._dataloaders,
            self.process_index,
            self.scaler,
            map_location,
            load_kwargs,
            **load_model_func_kwargs,
        )
        if "step" in kept:
            self.step = kept["step"]
        saved = [name for name in os.listdir(input_dir) if re.fullmatch(r"custom_checkpoint_\d+\.pkl", name)]
        if len(saved) != len(self._custom_objects):
            raise RuntimeError(
                f"Number of custom checkpoints in folder {input_dir} does not match the number of registered objects: "
                f"found {len(saved)}, and {len(self._custom_objects)} are registered."
            )
        for index, item in enumerate(self._custom_objects):
            files.load_custom_state(item, input_dir, index)

    def _found(self: Any, input_dir: Any) -> str:
        if input_dir is not None:
            folder: str = os.path.expanduser(input_dir)
            if not os.path.isdir(folder):
                raise ValueError(f"Tried to find {folder} but folder does not exist")
            return folder
        if not self.project_configuration.automatic_checkpoint_naming:
            raise ValueError("No input_dir provided and automatic checkpoint naming is disabled.")
        base = os.path.join(self.project_dir, "checkpoints")
        folders = _folders(base)
        if not folders:
            raise ValueError(f"{base} has no folder checkpoint_0, checkpoint_1, ... to load; give input_dir")
        return folders[-1]

    def _read_strategy(self: Any, input_dir: str, options: dict[str, Any]) -> list[Any]:
        if self.distributed_type == DistributedType.DEEPSPEED:
            for index, engine in enumerate(self._models):
                engine.load_checkpoint(input_dir, files.MODEL if index == 0 else f"{files.MODEL}_{index}", **options)
            return []
        if self.distributed_type == DistributedType.FSDP:
            from accel_compat.checkpoints.sharded import load_fsdp_model, load_fsdp_optimizer

            plugin = self.state.fsdp_plugin
            for index, model in enumerate(self._models):
                load_fsdp_model(plugin, self, model, input_dir, index)
            for index, optimizer in enumerate(self._optimizers):
                load_fsdp_optimizer(plugin, self, optimizer, self._models[index], input_dir, index)
            return []
        return list(self._models)

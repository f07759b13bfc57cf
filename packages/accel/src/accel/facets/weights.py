"""Weights of an Accelerator's models: extracted, exported for other tools, and loaded."""

import os
from abc import ABC
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import torch
from torch import nn

from accel.setup.kwargs_handlers import ProjectConfiguration
from accel_state.errors import ConfigError

if TYPE_CHECKING:
    from accel_backends import Backend
    from accel_ckpt.io.storage import Location
    from accel_state.session import Session


class WeightsFacet(ABC):
    """Passes the state of models to accel_ckpt's exports, and loaded weights to the backend."""

    session: "Session"
    backend: "Backend"
    project_configuration: ProjectConfiguration

    def get_state_dict(
        self, model: nn.Module, unwrap: bool = True, *, sharded: bool = False
    ) -> dict[str, torch.Tensor]:
        """Returns the model's parameters and buffers by FQN.

        If the model is sharded, the main process gets full tensors in host memory and the others an empty dict, unless
        ``sharded`` requests each rank's own shards (DTensors). With ``unwrap=False`` the result is the ``state_dict``
        of the wrapped model.

        Collective: every rank of the group must call this.

        Raises:
            SessionError: the model is sharded and ``end_training`` was called, so the other shards cannot be gathered.
        """
        if not unwrap:
            return model.state_dict()
        from accel_backends.ops.state_dicts import with_aliases

        self._need_all_parts()
        state = self.backend.states.model(model) if sharded else self.backend.states.full_model(model)
        return with_aliases(model, state)

    def full_parameters(self, model: nn.Module, *, writeback: bool = True) -> AbstractContextManager[None]:
        """Within the block, every process has full parameters, to be read or to be changed alike on all.

        Changes are kept unless ``writeback`` is False.

        Collective: every rank of the group must call this.

        Raises:
            SessionError: the model is sharded and ``end_training`` was called, so the other shards cannot be gathered.
        """
        self._need_all_parts()
        return self.backend.states.full_parameters(model, writeback=writeback)

    def _need_all_parts(self) -> None:
        """Refuses operations that need other ranks' shards of a model after the process group was closed."""
        if self.backend.capabilities.sharded:
            self.session.live_group()

    def save_model(
        self,
        model: nn.Module,
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> "list[Location]":
        """Writes the model as plain safetensors with an index, as other tools read them, and returns the files.

        Sharded parameters are gathered one at a time; the main process writes. Tied parameters are written once. Files
        of an earlier, larger save are removed. ``save_directory`` may be a URL.

        Collective: every rank of the group must call this.

        Raises:
            CheckpointError: the model cannot be written as safetensors, or the disk refuses.
            ConfigError: ``safe_serialization`` is off, which would write a pickle.
        """
        from accel_ckpt import export_model

        _refuse_pickle(safe_serialization, "torch.save(accelerator.get_state_dict(model), path)")
        state = self.get_state_dict(model, sharded=True)
        return export_model(state, save_directory, max_shard_size, group=self.session.live_group())

    def load_model(self, model: nn.Module, path: str | os.PathLike[str], *, strict: bool = True) -> None:
        """Loads weights from safetensors files, as ``save_model`` or other tools write them, into a prepared model.

        Each process reads its own shard of a sharded model, so no process ever holds the full model, not even before
        ``prepare`` if the model was built on the meta device. ``strict=False`` tolerates missing and unknown names.

        Collective: every rank of the group must call this.

        Raises:
            CheckpointError: there are no such files, they are damaged, or they belong to another model.
        """
        from accel_ckpt import load_model_parts

        parts = load_model_parts(path, self.backend.states.model(model))
        self.backend.states.load_model(model, parts, strict=strict)

    def save(self, obj: Mapping[str, torch.Tensor], f: str | os.PathLike[str], safe_serialization: bool = True) -> None:
        """Writes named tensors to the safetensors file ``f``, on the main process (or one of each node).

        ``ProjectConfiguration.save_on_each_node`` decides which. Not a collective: it may be called on any processes.

        Raises:
            CheckpointError: ``obj`` holds anything but full tensors, or the disk refuses.
            ConfigError: ``safe_serialization`` is off, or ``obj`` is not a mapping, which would need a pickle.
        """
        from accel_ckpt import export_tensors

        _refuse_pickle(safe_serialization, "torch.save(obj, f) on the main process")
        if not isinstance(obj, Mapping):
            raise ConfigError(
                f"save writes a mapping of names to tensors, not a {type(obj).__qualname__}; what must resume belongs "
                "to register_for_checkpointing and save_state"
            )
        each_node = self.project_configuration.save_on_each_node
        if self.session.is_local_main_process if each_node else self.session.is_main_process:
            export_tensors(obj, f)


def _refuse_pickle(safe_serialization: bool, instead: str) -> None:
    if not safe_serialization:
        raise ConfigError(
            "safe_serialization=False would write a pickle, which runs code when it is read; leave it out to get "
            f"safetensors, or write the pickle yourself: {instead}"
        )

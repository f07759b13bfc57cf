"""An Accelerator's side towards weights: taken out of prepared models, written for other tools, and read back."""

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
    """Hands the state of models to accel_ckpt's exports, and what those read to the backend."""

    session: "Session"
    backend: "Backend"
    project_configuration: ProjectConfiguration

    def get_state_dict(
        self, model: nn.Module, unwrap: bool = True, *, sharded: bool = False
    ) -> dict[str, torch.Tensor]:
        """The model's parameters and buffers under all of their own names. To be called on all processes.

        Of a sharded model the main process gets full tensors on the host and the others get nothing, unless
        ``sharded`` asks for everybody's own part (DTensors). With ``unwrap=False`` the state is what the wrapped
        model's own ``state_dict`` gives.

        Raises:
            SessionError: the model is sharded, and after ``end_training`` nobody has the other parts.
        """
        if not unwrap:
            return model.state_dict()
        from accel_backends.ops.state_dicts import with_aliases

        self._need_all_parts()
        state = self.backend.model_state(model) if sharded else self.backend.full_model_state(model)
        return with_aliases(model, state)

    def full_parameters(self, model: nn.Module, *, writeback: bool = True) -> AbstractContextManager[None]:
        """Inside, parameters are whole on every process, to be looked at or changed by all alike.

        Changes last unless ``writeback`` is off. To be entered on all processes.

        Raises:
            SessionError: the model is sharded, and after ``end_training`` nobody has the other parts.
        """
        self._need_all_parts()
        return self.backend.full_parameters(model, writeback=writeback)

    def _need_all_parts(self) -> None:
        """Refuses what takes other processes' parts of a model, where there is no group to get them from any more."""
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

        Sharded parameters are put together one at a time, so this is to be called on all processes; the main one
        writes. Tied parameters are written once. Files of an earlier, larger save are removed. ``save_directory`` may
        be a URL.

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

        Each process reads its own part of a sharded model, so no process ever holds all of it: with a model that was
        built on the meta device, none has before either. ``strict=False`` tolerates missing and unknown names. To be
        called on all processes.

        Raises:
            CheckpointError: there are no such files, they are damaged, or they belong to another model.
        """
        from accel_ckpt import load_model_parts

        parts = load_model_parts(path, self.backend.model_state(model))
        self.backend.load_model_state(model, parts, strict=strict)

    def save(self, obj: Mapping[str, torch.Tensor], f: str | os.PathLike[str], safe_serialization: bool = True) -> None:
        """Writes named tensors to the safetensors file ``f``, on the main process (or one of each node).

        ``ProjectConfiguration.save_on_each_node`` decides which. Not a collective: it may be called on any processes.

        Raises:
            CheckpointError: ``obj`` holds something else than full tensors, or the disk refuses.
            ConfigError: ``safe_serialization`` is off, or ``obj`` is no mapping: that would take a pickle.
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

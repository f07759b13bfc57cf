"""States of DeepSpeed engines, for the backend's role."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, final

import torch
from torch import nn
from torch.optim import Optimizer

from accel_backends.ops.footprint import Held
from accel_backends.ops.fqn import named_parameters
from accel_backends.roles.gradients import NOTHING
from accel_backends.roles.states import ReplicatedStates
from accel_deepspeed.checkpoint import state_dicts
from accel_deepspeed.engine.loss_scale import EngineScale, set_step_counts, step_counts
from accel_deepspeed.zero.footprint import held_by
from accel_deepspeed.zero.gathered_parameters import full_parameters

if TYPE_CHECKING:
    from accel_backends.core.backend import Backend
    from accel_deepspeed.engine.engine import Prepared
    from accel_deepspeed.engine.registry import Engines
    from accel_deepspeed.layout import ZeroLayout


@final
class ZeroStates(ReplicatedStates):
    """States of engines as DTensors by FQN; those of models without an engine are full.

    Methods that return or load states are collective: every rank of the group must call them. They load DTensors, or
    full tensors that are equal on every rank.
    """

    def __init__(self, backend: "Backend", engines: "Engines", layout: "ZeroLayout") -> None:
        super().__init__(backend)
        self._engines, self._layout = engines, layout

    def sync_buffers(self, models: Iterable[nn.Module]) -> None:
        """Broadcasts rank 0's buffers, because forwards since ``prepare`` have updated each rank's separately."""
        buffers = [buffer for model in models if self._engines.find(model) is not None for buffer in model.buffers()]
        if buffers and self.run.session.world_size > 1:
            from accel_state.collectives.tensors import broadcast

            broadcast(buffers, group=self.run.session.group)

    def model(self, model: nn.Module) -> dict[str, Any]:
        """Returns DTensors by FQN, in fp32 if the optimizer has master weights."""
        prepared = self._engines.find_stated(model)
        if prepared is None:
            return super().model(model)
        return state_dicts.model_state(prepared.engine, prepared.parts, self.partition_layout(prepared))

    def load_model(self, model: nn.Module, state: Mapping[str, Any], *, strict: bool = True) -> None:
        prepared = self._engines.find_stated(model)
        if prepared is None:
            super().load_model(model, state, strict=strict)
            return
        fitted = state_dicts.fitted_state(prepared.engine, state, strict=strict)
        state_dicts.load_model_state(prepared.engine, prepared.parts, fitted)
        prepared.edits.forget()

    def full_model(self, model: nn.Module, *, main_only: bool | None = None) -> dict[str, Any]:
        """Returns full tensors in host memory, in fp32, or in the compute dtype with ``zero3_save_16bit_model``.

        Other ranks than 0 return an empty dict unless ``main_only`` is False.
        """
        prepared = self._engines.find_stated(model)
        if prepared is None:
            return super().full_model(model, main_only=main_only)
        keep = main_only is False or self.run.session.rank == 0
        parts = None if prepared.saves_16bit else prepared.parts
        return state_dicts.full_state(prepared.engine, parts, keep=keep)

    def full_parameters(self, model: nn.Module, *, writeback: bool = True) -> AbstractContextManager[None]:
        prepared = self._engines.find(model)
        return NOTHING if prepared is None else full_parameters(prepared, writeback=writeback)

    def optimizer(self, optimizer: Optimizer, models: Sequence[nn.Module]) -> dict[str, Any]:
        prepared = self._engines.of_optimizer(optimizer)
        if prepared.parts is None:
            return super().optimizer(optimizer, [prepared.engine])
        return state_dicts.optimizer_state(prepared.engine, prepared.parts, self.partition_layout(prepared))

    def load_optimizer(self, optimizer: Optimizer, models: Sequence[nn.Module], state: Mapping[str, Any]) -> None:
        prepared = self._engines.of_optimizer(optimizer)
        if prepared.parts is None:
            super().load_optimizer(optimizer, [prepared.engine], state)
        else:
            state_dicts.load_optimizer_state(prepared.engine, prepared.parts, self.partition_layout(prepared), state)

    def held(self, model: nn.Module, optimizer: Optimizer) -> Held:
        prepared = self._engines.find(model)
        return super().held(model, optimizer) if prepared is None else held_by(prepared)

    @property
    def loss_scales(self) -> Sequence[EngineScale]:
        """One loss scale for each engine in fp16."""
        return [EngineScale(one.engine) for one in self._engines if one.gradients and one.engine.fp16_enabled()]

    def counts(self) -> list[dict[str, int]]:
        return [step_counts(one.engine) for one in self._engines]

    def load_counts(self, counts: Sequence[Mapping[str, int]]) -> None:
        for one, state in zip(self._engines, counts, strict=False):
            set_step_counts(one.engine, state)

    def templates(self, optimizer: Optimizer, models: Sequence[nn.Module]) -> dict[str, torch.Tensor]:
        prepared = self._engines.of_optimizer(optimizer)
        if prepared.parts is None:
            return super().templates(optimizer, [prepared.engine])
        parameters = named_parameters(prepared.engine)
        layout = self.partition_layout(prepared)
        return {name: layout.empty(parameters[name]) for group in prepared.groups for name in group}

    def partition_layout(self, prepared: "Prepared") -> state_dicts.PartitionLayout:
        """Returns the mesh and the groups of parameters over which the states of an engine are sharded."""
        return state_dicts.PartitionLayout(self._layout.mesh, prepared.groups)

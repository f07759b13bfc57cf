"""States of models that ``fully_shard`` has sharded, as DTensors."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any, final

import torch
from torch import nn
from torch.optim import Optimizer

from accel_backends.fsdp.mesh import ShardingMesh
from accel_backends.fsdp.shard import ShardedModels, rest
from accel_backends.ops.dtensor import full_parameters, is_dtensor, placed_like, placed_over_axes
from accel_backends.ops.fqn import innermost, named_parameters
from accel_backends.ops.state_dicts import ONLY_PLACES, STATE, load_model_state, optimizer_names
from accel_backends.roles.states import ReplicatedStates
from accel_state.errors import BackendError

if TYPE_CHECKING:
    from accel_backends.core.backend import Backend


@final
class DTensorStates(ReplicatedStates):
    """States as DTensors by FQN, over all axes of ``mesh``; ``sharded``: the models that the backend has sharded."""

    def __init__(self, backend: "Backend", sharded: ShardedModels, mesh: ShardingMesh) -> None:
        super().__init__(backend)
        self._sharded, self._mesh = sharded, mesh

    def model(self, model: nn.Module) -> dict[str, Any]:
        """Returns DTensors by FQN."""
        rest(self._sharded, [model])
        return {name: self._mesh.over_all_ranks(value) for name, value in super().model(model).items()}

    def load_model(self, model: nn.Module, state: Mapping[str, Any], *, strict: bool = True) -> None:
        """Loads DTensors, or full tensors that are equal on every rank."""
        rest(self._sharded, [model])
        load_model_state(model, state, strict=strict, place=placed_over_axes)

    def optimizer(self, optimizer: Optimizer, models: Sequence[nn.Module]) -> dict[str, Any]:
        """Returns optimizer states as DTensors, by FQN."""
        rest(self._sharded, models)
        state = super().optimizer(optimizer, models)
        values = {
            name: {key: self._mesh.over_all_ranks(value) for key, value in entries.items()}
            for name, entries in state[STATE].items()
        }
        return {**state, STATE: values}

    def templates(self, optimizer: Optimizer, models: Sequence[nn.Module]) -> dict[str, torch.Tensor]:
        """Returns, by FQN, tensors placed as the optimizer's state of the parameter is."""
        found = super().templates(optimizer, models)
        return {name: self._mesh.over_all_ranks(value) for name, value in found.items()}

    def load_optimizer(self, optimizer: Optimizer, models: Sequence[nn.Module], state: Mapping[str, Any]) -> None:
        """Loads DTensors, or full tensors that are equal on every rank."""
        rest(self._sharded, models)
        held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        parameters = dict(zip(optimizer_names(optimizer, models), held, strict=True))
        values = {
            name: {key: placed_over_axes(value, parameters.get(name)) for key, value in entries.items()}
            for name, entries in state[STATE].items()
        }
        super().load_optimizer(optimizer, models, {**state, STATE: values})

    def full_parameters(self, model: nn.Module, *, writeback: bool = True) -> AbstractContextManager[None]:
        """Context in which parameters are full tensors on every rank; changes are kept unless ``writeback`` is off.

        Collective: every rank of the group must call this.
        """
        rest(self._sharded, [model])
        return full_parameters(model, writeback=writeback)

    def sync_buffers(self, models: Iterable[nn.Module]) -> None:
        """Broadcasts rank 0's buffers, because forwards since ``prepare`` have updated each rank's separately."""
        buffers = [buffer for model in models if innermost(model) in self._sharded for buffer in model.buffers()]
        if buffers and self.run.session.world_size > 1:
            from accel_state.collectives.tensors import broadcast

            broadcast(buffers, group=self.run.session.group)


def take_full_tensors(model: nn.Module) -> None:
    """Makes every module with DTensors load full tensors that are equal on every rank; without communication."""
    for module in model.modules():
        if any(is_dtensor(parameter) for parameter in module._parameters.values() if parameter is not None):
            module.register_load_state_dict_pre_hook(_place)


def refuse_full_tensors(wrapped: nn.Module, inner: nn.Module, ignored: Collection[str], *, sharded: bool) -> None:
    """Makes FSDP1's wrapper and its wrapped model refuse parameters that are not DTensors.

    A wrapper that is not ``sharded`` (NO_SHARD) loads full tensors; torch loads none into the model within it.

    Args:
        wrapped: the wrapper.
        inner: the wrapped model.
        ignored: names of its modules whose parameters are not sharded.
    """
    instead = "" if sharded else "call load_state_dict of the prepared model, "
    refuse = partial(_refuse, tuple(f"{name}." for name in ignored), instead)
    for module in (wrapped, inner) if sharded else (inner,):
        handle = module.register_load_state_dict_pre_hook(refuse)
        hooks: Any = module._load_state_dict_pre_hooks
        hooks.move_to_end(handle.id, last=False)  # before torch's own hook, which fails


def _place(module: nn.Module, state: Any, prefix: str, *_: Any) -> None:
    for name, parameter in module._parameters.items():
        if prefix + name in state:
            state[prefix + name] = placed_like(state[prefix + name], parameter)


setattr(_place, ONLY_PLACES, True)


def _refuse(ignored: tuple[str, ...], instead: str, module: nn.Module, state: Any, prefix: str, *_: Any) -> None:
    if prefix:  # the hook of an outer module has run already
        return
    names = named_parameters(module)
    given = (name for name, value in state.items() if name in names and not is_dtensor(value))
    full = next((name for name in given if not name.startswith(ignored)), None)
    if full is not None:
        raise BackendError(
            f"load_state_dict of a model prepared with fsdp_version=1 was given the full {full}, and its "
            f"parameters are flat; {instead}load weights before prepare, or copy them within "
            "accelerator.full_parameters(model), or use fsdp_version=2, which takes full tensors"
        )

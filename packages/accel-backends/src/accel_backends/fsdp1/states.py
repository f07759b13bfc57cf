"""States of models in ``FullyShardedDataParallel``, as DTensors."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, final

from torch import nn
from torch.optim import Optimizer

from accel_backends.fsdp1.wrap import first_names_of
from accel_backends.ops.dtensor import placed_like, sharded_like
from accel_backends.ops.fqn import find_fsdp1, innermost, named_parameters
from accel_backends.ops.state_dicts import STATE
from accel_backends.roles.states import ReplicatedStates
from accel_state.errors import BackendError, CheckpointMismatchError
from accel_state.watchdog.decorator import recorded

if TYPE_CHECKING:
    from torch.distributed.fsdp import FullyShardedDataParallel

MESHLESS = (
    "wrapped in FullyShardedDataParallel without a device_mesh: it trains, but its states are in a form that torch has "
    "given up and cannot be saved; wrap it with device_mesh=init_device_mesh(...), or give prepare the bare model"
)


@final
class FlatStates(ReplicatedStates):
    """States as DTensors by FQN, which torch makes of flat parameters and their optimizers."""

    @recorded("get_state_dict")
    def model(self, model: nn.Module) -> dict[str, Any]:
        """Returns DTensors by FQN. Collective: every rank of the group must call this.

        Raises:
            BackendError: the user has wrapped the model without a mesh.
        """
        wrapped = find_fsdp1(model)
        if wrapped is None:
            return super().model(model)
        if wrapped._device_mesh is None:
            raise BackendError(f"{type(innermost(model)).__name__} was {MESHLESS}")
        first = first_names_of(wrapped)
        state: dict[str, Any] = {}
        for name, value in wrapped.state_dict().items():
            state.setdefault(first.get(name, name), value)
        return state

    def load_model(self, model: nn.Module, state: Mapping[str, Any], *, strict: bool = True) -> None:
        """Loads DTensors, or full tensors that are equal on every rank."""
        wrapped = find_fsdp1(model)
        if wrapped is None:
            super().load_model(model, state, strict=strict)
            return
        first, own = first_names_of(wrapped), wrapped.state_dict()
        given = {first.get(name, name): value for name, value in state.items()}
        known = {first.get(name, name) for name in own}
        missing, unknown = sorted(known - set(given)), sorted(set(given) - known)
        pairs = {name: (value, given.get(first.get(name, name))) for name, value in own.items()}
        misshapen = [name for name, (mine, other) in pairs.items() if other is not None and other.shape != mine.shape]
        if misshapen or (strict and (missing or unknown)):
            raise CheckpointMismatchError(
                f"state of another {type(innermost(model)).__name__}: it lacks {missing[:5]}, holds unknown "
                f"{unknown[:5]}, and has other shapes of {misshapen[:5]}"
            )
        placed = {
            name: sharded_like(given[first.get(name, name)], value)
            for name, value in own.items()
            if first.get(name, name) in given
        }
        wrapped.load_state_dict(own | placed)

    def full_parameters(self, model: nn.Module, *, writeback: bool = True) -> AbstractContextManager[None]:
        """The wrapper's ``summon_full_params``."""
        from torch.distributed.fsdp import FullyShardedDataParallel

        summoned: AbstractContextManager[None] = FullyShardedDataParallel.summon_full_params(model, writeback=writeback)
        return summoned

    def optimizer(self, optimizer: Optimizer, models: Sequence[nn.Module]) -> dict[str, Any]:
        """Returns optimizer states as DTensors, by FQN."""
        from torch.distributed.fsdp import FullyShardedDataParallel

        model = self._model_of(optimizer, models)
        return FullyShardedDataParallel.optim_state_dict(model, optimizer)

    def load_optimizer(self, optimizer: Optimizer, models: Sequence[nn.Module], state: Mapping[str, Any]) -> None:
        """Loads DTensors, or full tensors that are equal on every rank."""
        from torch.distributed.fsdp import FullyShardedDataParallel

        model = self._model_of(optimizer, models)
        own = self.model(model)
        unknown = sorted(set(state[STATE]) - set(named_parameters(model)))
        if unknown:
            kind = type(optimizer).__name__
            raise CheckpointMismatchError(f"state of another {kind}: it holds unknown {unknown[:5]}")
        values = {
            name: {key: placed_like(value, own.get(name)) for key, value in entries.items()}
            for name, entries in state[STATE].items()
        }
        optimizer.load_state_dict(
            FullyShardedDataParallel.optim_state_dict_to_load(model, optimizer, {**state, STATE: values})
        )

    def _model_of(self, optimizer: Optimizer, models: Sequence[nn.Module]) -> "FullyShardedDataParallel":
        owners = updated(optimizer, models)
        wrapped = find_fsdp1(owners[0]) if len(owners) == 1 else None
        if wrapped is None:
            raise BackendError(
                f"{type(optimizer).__name__} updates {len(owners)} models; fsdp_version=1 saves optimizers of one "
                "sharded model each"
            )
        return wrapped


def updated(optimizer: Optimizer, models: Sequence[nn.Module]) -> list[nn.Module]:
    """Returns the models that hold parameters of the optimizer."""
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    return [model for model in models if held & {id(parameter) for parameter in model.parameters()}]

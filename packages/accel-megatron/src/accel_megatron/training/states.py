"""States of engines and their optimizers, for the backend's role: full tensors by FQN, the same for all degrees."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, final

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from accel_backends import ReplicatedStates
from accel_backends.ops.fqn import named_parameters
from accel_backends.ops.state_dicts import GROUPS, PARAMS, STATE, differences, fitted_groups
from accel_megatron.conversion.rules import stack_name
from accel_megatron.training.gathering import full_tensors, local_rules, local_tensors
from accel_state.errors import CheckpointMismatchError

if TYPE_CHECKING:
    from accel_backends import Backend
    from accel_megatron.training.engine import MegatronEngine
    from accel_megatron.training.optimizer import EngineOptimizer
    from accel_megatron.training.registry import MegatronEngines


@final
class MegatronStates(ReplicatedStates):
    """States by the names of the Transformers model, so that any backend and any degrees can load them.

    Every rank has the full tensors while a state is saved or loaded.
    """

    def __init__(self, backend: "Backend", engines: "MegatronEngines") -> None:
        super().__init__(backend)
        self._engines = engines

    def model(self, model: nn.Module) -> dict[str, Any]:
        """Returns full tensors by FQN, on every rank.

        Collective: every rank of the group must call this.
        """
        engine = self._engines.find(model)
        return full_tensors(engine.architecture, self._engines.weights(engine), engine.device)

    def load_model(self, model: nn.Module, state: Mapping[str, Any], *, strict: bool = True) -> None:
        """Loads full tensors by FQN.

        Raises:
            CheckpointMismatchError: names are missing or unknown (``strict``), or shapes differ.
        """
        engine = self._engines.find(model)
        source = engine.source
        known = {name: p.shape for name, p in named_parameters(source).items()}
        aliases = {name for name, _ in source.named_parameters(remove_duplicate=False)}
        missing = [name for name in known if name not in state]
        unknown = [name for name in state if name not in known and name not in aliases]
        kind = type(source).__name__
        if strict and (missing or unknown):
            raise CheckpointMismatchError(differences(kind, missing, unknown, list(known)))
        wrong = [name for name, shape in known.items() if name in state and state[name].shape != shape]
        if wrong:
            raise CheckpointMismatchError(
                f"state of another {kind}: {wrong[0]} is {tuple(state[wrong[0]].shape)} here and "
                f"{tuple(known[wrong[0]])} in the model"
            )
        engine.load_weights(local_tensors(engine.architecture, state))

    def optimizer(self, optimizer: Optimizer, models: Sequence[nn.Module]) -> dict[str, Any]:
        """Returns states as full tensors by FQN, on every rank.

        Collective: every rank of the group must call this.
        """
        one = self._engines.of_optimizer(optimizer)
        held = one.held()
        keys: list[set[str]] = [set() for _ in range(dist.get_world_size())]
        dist.all_gather_object(keys, {key for values in held.values() for key in values})
        state: dict[str, dict[str, Any]] = {}
        for key in sorted(set.union(*keys)):
            of_key = {name: values[key] for name, values in held.items() if key in values}
            for name, value in _full_values(one.engine, of_key).items():
                state.setdefault(name, {})[key] = value
        groups = [
            {**{key: value for key, value in group.items() if key != PARAMS}, PARAMS: list(names)}
            for group, names in zip(one.optimizer.param_groups, one.groups, strict=True)
        ]
        return {STATE: state, GROUPS: groups}

    def load_optimizer(self, optimizer: Optimizer, models: Sequence[nn.Module], state: Mapping[str, Any]) -> None:
        """Loads full tensors by FQN.

        Raises:
            CheckpointMismatchError: the parameters or their grouping differ.
        """
        one = self._engines.of_optimizer(optimizer)
        options = fitted_groups(one.optimizer, one.groups, state)
        for group, values in zip(one.optimizer.param_groups, options, strict=True):
            group.update(values)
        one.load({name: _local_values(one, name, state[STATE]) for name in one.parameters})

    def templates(self, optimizer: Optimizer, models: Sequence[nn.Module]) -> dict[str, torch.Tensor]:
        """Returns uninitialised full tensors by FQN."""
        one = self._engines.of_optimizer(optimizer)
        shapes = named_parameters(one.engine.source)
        device = self.run.session.device.torch
        return {
            name: torch.empty(shapes[name].shape, dtype=shapes[name].dtype, device=device)
            for names in one.groups
            for name in names
        }


def _full_values(engine: "MegatronEngine", held: Mapping[str, Any]) -> dict[str, Any]:
    """Returns one kind of state by FQN: full tensors, or numbers as they are."""
    scalars = {name: value for name, value in held.items() if not isinstance(value, torch.Tensor) or not value.dim()}
    found: dict[str, Any] = full_tensors(
        engine.architecture, {name: value for name, value in held.items() if name not in scalars}, engine.device
    )
    from megatron.core import parallel_state

    pipeline = parallel_state.get_pipeline_model_parallel_group()
    named = {
        one: scalars[name]
        for name, rule in local_rules(engine.architecture, copies=False)
        if name in scalars
        for one in map(stack_name, rule.names)
    }
    stages: list[dict[str, Any]] = [{} for _ in range(pipeline.size())]
    dist.all_gather_object(stages, named, group=pipeline)
    for one in stages:
        found |= one
    return found


def _local_values(one: "EngineOptimizer", name: str, state: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the saved state of a parameter of this rank's stage, by key."""
    names = [stack_name(each) for each in one.names_of(name)]
    if names[0] not in state:
        return {}
    values: dict[str, Any] = {}
    for key, value in state[names[0]].items():
        if isinstance(value, torch.Tensor) and value.dim():
            full = {each: state[each][key] for each in names}
            values[key] = local_tensors(one.engine.architecture, full)[name]
        else:
            values[key] = value.clone() if isinstance(value, torch.Tensor) else value
    return values

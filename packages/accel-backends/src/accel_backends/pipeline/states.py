"""States of models whose stages are on the ranks of a pipeline, under the names of the user's own model."""

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, final

import torch
from torch import nn
from torch.optim import Optimizer

from accel_backends.ops.dtensor import placed_over_axes
from accel_backends.ops.fqn import innermost
from accel_backends.ops.state_dicts import GROUPS, PARAMS, STATE, load_model_state, names_stored
from accel_backends.pipeline.gather import gather_stages
from accel_backends.pipeline.mesh import StageMesh
from accel_backends.roles.states import ReplicatedStates
from accel_state.errors import BackendError

if TYPE_CHECKING:
    from accel_backends.core.backend import Backend

Names = MutableMapping[nn.Module, frozenset[str]]
GroupNames = MutableMapping[Optimizer, list[list[str]]]
TiedNames = MutableMapping[nn.Module, str]


@final
class PipelineStates(ReplicatedStates):
    """States of this rank's stages; those of all ranks together are the state of the model.

    Args:
        backend: as for the base class.
        mesh: ranks of this rank's pipeline, and those that share its stages.
        names: names of all tensors of each model, those of other stages included.
        group_names: names of the parameters in each group of each optimizer, those of other stages included.
        tied: name of the weight that ranks of the first stage share with other ranks, of each model with one.
    """

    def __init__(
        self, backend: "Backend", *, mesh: StageMesh, names: Names, group_names: GroupNames, tied: TiedNames
    ) -> None:
        super().__init__(backend)
        self._tied = tied
        self._mesh, self._names, self._group_names = mesh, names, group_names

    def elsewhere(self, model: nn.Module) -> frozenset[str]:
        """Names of the tensors of other stages."""
        inner = innermost(model)
        return self._names.get(inner, frozenset()) - names_stored(inner).keys()

    def model(self, model: nn.Module) -> dict[str, Any]:
        """Returns the tensors of this rank's stages by FQN; sharded ones as DTensors over all ranks with the stages."""
        return self._over_ranks(super().model(model), [model])

    def load_model(self, model: nn.Module, state: Mapping[str, Any], *, strict: bool = True) -> None:
        """Loads this rank's stages from the state of a model, of which it may lack the other stages."""
        others = self.elsewhere(model)
        own = {name: value for name, value in state.items() if name not in others}
        load_model_state(model, own, strict=strict, place=placed_over_axes)

    def full_model(self, model: nn.Module, *, main_only: bool | None = None) -> dict[str, Any]:
        """Returns the state of all stages in host memory, on rank 0, or on every rank if not ``main_only``.

        Collective: every rank of the group must call this.
        """
        return self._gathered(self.model(model), main_only)

    def full_parameters(self, model: nn.Module, *, writeback: bool = True) -> AbstractContextManager[None]:
        """Refuses: no rank has the modules of other stages.

        Raises:
            BackendError: always.
        """
        raise BackendError(
            "full_parameters: each rank of a pipeline has the modules of its own stages only; nearest: "
            "get_state_dict(model), which gathers those of all stages"
        )

    def optimizer(self, optimizer: Optimizer, models: Sequence[nn.Module]) -> dict[str, Any]:
        """Returns the states of this rank's parameters, and groups that name the parameters of all stages."""
        own = super().optimizer(optimizer, models)
        own[STATE] = {name: self._over_ranks(values, models, name) for name, values in own[STATE].items()}
        names = self._group_names.get(optimizer)
        if names is None:
            return own
        groups = [{**group, PARAMS: list(here)} for group, here in zip(own[GROUPS], names, strict=True)]
        return {STATE: own[STATE], GROUPS: groups}

    def templates(self, optimizer: Optimizer, models: Sequence[nn.Module]) -> dict[str, torch.Tensor]:
        """Returns, by FQN, tensors placed as the optimizer's state of the parameter is."""
        return self._over_ranks(super().templates(optimizer, models), models)

    def load_optimizer(self, optimizer: Optimizer, models: Sequence[nn.Module], state: Mapping[str, Any]) -> None:
        """Loads the states of this rank's parameters from those of all stages."""
        groups = super().optimizer(optimizer, models)[GROUPS]
        own = {name for group in groups for name in group[PARAMS]}
        others = {name for here in self._group_names.get(optimizer, ()) for name in here} - own
        parameters = super().templates(optimizer, models)
        super().load_optimizer(
            optimizer,
            models,
            {
                STATE: {
                    name: {key: placed_over_axes(value, parameters.get(name)) for key, value in values.items()}
                    for name, values in state[STATE].items()
                    if name not in others
                },
                GROUPS: [
                    {**group, PARAMS: [name for name in group[PARAMS] if name not in others]} for group in state[GROUPS]
                ],
            },
        )

    def full_optimizer(
        self, optimizer: Optimizer, models: Sequence[nn.Module], *, main_only: bool | None = None
    ) -> dict[str, Any]:
        """Returns the states of the parameters of all stages in host memory; otherwise as ``full_model``.

        Collective: every rank of the group must call this.
        """
        own = self.optimizer(optimizer, models)
        found: dict[str, dict[str, Any]] = {}
        for (name, key), value in self._gathered(dict(_entries(own[STATE])), main_only).items():
            found.setdefault(name, {})[key] = value
        return {STATE: found, GROUPS: own[GROUPS]} if found or not own[STATE] else {}

    def _over_ranks(
        self, values: Mapping[str, Any], models: Sequence[nn.Module], name: str | None = None
    ) -> dict[str, Any]:
        """DTensors over all ranks that have them; ``name``: parameter of all values; None: keys are parameters."""
        tied = {self._tied.get(innermost(model)) for model in models}
        return {key: self._mesh.over_stage_ranks(value, tied=(name or key) in tied) for key, value in values.items()}

    def _gathered(self, own: Mapping[Any, Any], main_only: bool | None) -> dict[Any, Any]:
        session = self.run.session
        keep = main_only is False or session.rank == 0
        return gather_stages(own, self._mesh.pipeline, session.device.torch, keep=keep, host=True)


def _entries(state: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[tuple[str, str], torch.Tensor | Any]]:
    for name, values in state.items():
        for key, value in values.items():
            yield (name, key), value

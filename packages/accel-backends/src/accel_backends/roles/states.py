"""Role of a backend: states of models and optimizers, saved, loaded and exposed."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from accel_backends.core.config import FullStateForm
from accel_backends.ops.dtensor import full_optimizer_state, full_parameters, full_state, is_dtensor
from accel_backends.ops.footprint import Held
from accel_backends.ops.state_dicts import (
    STATE,
    load_model_state,
    load_optimizer_state,
    model_state,
    optimizer_state,
    state_templates,
)
from accel_backends.roles.gradients import NOTHING

if TYPE_CHECKING:
    from accel_backends.core.backend import Backend


class ReplicatedStates:
    """States that are full on each rank; base of the states of other backends.

    Attributes:
        run: processes and options of the backend.
        config: the backend's options.
        loss_scale: loss scale of fp16; None without one.
    """

    def __init__(self, backend: "Backend") -> None:
        """Takes what it needs from a backend whose loss scale is known."""
        self.run, self.config = backend.run, backend.config
        self.loss_scale = backend.loss_scale

    # Models

    def model(self, model: nn.Module) -> dict[str, Any]:
        """Returns the model's state dict by FQN, see ``state_dicts``; sharded tensors stay sharded."""
        return model_state(model)

    def load_model(self, model: nn.Module, state: Mapping[str, Any], *, strict: bool = True) -> None:
        """Loads a model state that any backend saved at any world size.

        Raises:
            CheckpointMismatchError: the state is of another model.
        """
        load_model_state(model, state, strict=strict)

    def elsewhere(self, model: nn.Module) -> frozenset[str]:
        """Names of the model's tensors that are on other ranks only, so that ``model`` does not return them.

        Default: none.
        """
        return frozenset()

    def full_model(self, model: nn.Module, *, main_only: bool | None = None) -> dict[str, Any]:
        """Returns the model's state dict with full tensors. Collective: every rank of the group must call this.

        ``main_only``: if tensors are sharded, only rank 0 receives the state and other ranks an empty one; None: as the
        backend's options say. Default: the form in the options; without a form, rank 0 receives gathered tensors in
        host memory if there are DTensors, otherwise every rank returns its own full tensors.
        """
        state = self.model(model)
        return self._handed_out(full_state, state, self.config.state_form or _gathered_form(state.values()), main_only)

    def full_parameters(self, model: nn.Module, *, writeback: bool = True) -> AbstractContextManager[None]:
        """Context in which parameters are full tensors; changes persist if ``writeback``.

        Default: DTensors are all-gathered; other parameters always are and do.

        Collective if there are DTensors: every rank of the group must call this.
        """
        return full_parameters(model, writeback=writeback) if any(map(is_dtensor, model.parameters())) else NOTHING

    def sync_buffers(self, models: Iterable[nn.Module]) -> None:
        """Copies rank 0's buffers to all ranks before a save, if training equalises them only later.

        Default: nothing, because there is one replica.

        Collective: every rank of the group must call this.
        """

    # Optimizers

    def optimizer(self, optimizer: Optimizer, models: Sequence[nn.Module]) -> dict[str, Any]:
        """Returns the optimizer's state dict by FQN, see ``state_dicts``."""
        return optimizer_state(optimizer, models)

    def load_optimizer(self, optimizer: Optimizer, models: Sequence[nn.Module], state: Mapping[str, Any]) -> None:
        """Loads an optimizer state that any backend saved at any world size.

        Raises:
            CheckpointMismatchError: the state is of other parameters.
        """
        load_optimizer_state(optimizer, models, state)

    def full_optimizer(
        self, optimizer: Optimizer, models: Sequence[nn.Module], *, main_only: bool | None = None
    ) -> dict[str, Any]:
        """Returns the optimizer's state dict with full tensors. Collective: every rank of the group must call this.

        Default: as ``full_model``.
        """
        state = self.optimizer(optimizer, models)
        values = (value for entries in state[STATE].values() for value in entries.values())
        form = self.config.optimizer_state_form or _gathered_form(values)
        return self._handed_out(full_optimizer_state, state, form, main_only)

    def templates(self, optimizer: Optimizer, models: Sequence[nn.Module]) -> dict[str, torch.Tensor]:
        """Returns, by FQN, tensors placed as the optimizer's state of the parameter is. Default: the parameters."""
        return state_templates(optimizer, models)

    # Loss scales, counters, inspection

    @property
    def loss_scales(self) -> Sequence[Any]:
        """Loss scales, as objects with ``state_dict`` and ``load_state_dict``. Default: the backend's, if any."""
        return [] if self.loss_scale is None else [self.loss_scale]

    def counts(self) -> list[dict[str, int]]:
        """Returns JSON that is saved with a checkpoint and not needed to load it (step counts).

        Default: an empty list.
        """
        return []

    def load_counts(self, counts: Sequence[Mapping[str, int]]) -> None:
        """Restores the step counts that ``counts`` returned, if they are of this backend. Default: does nothing."""

    def held(self, model: nn.Module, optimizer: Optimizer) -> Held:
        """Returns this rank's tensors of parameters, gradients and optimizer state.

        Default: those of the two objects.
        """
        return Held.of(model, optimizer)

    def _handed_out(
        self,
        gather: Callable[..., dict[str, Any]],
        state: dict[str, Any],
        form: FullStateForm | None,
        main_only: bool | None,
    ) -> dict[str, Any]:
        if form is None:
            return state
        main_only = form.rank0_only if main_only is None else main_only
        return gather(state, keep=not main_only or self.run.session.rank == 0, host=form.offload_to_cpu)


def _gathered_form(values: Iterable[Any]) -> FullStateForm | None:
    """Returns the default form if any value is a DTensor, which has to be gathered; otherwise None."""
    return FullStateForm() if any(map(is_dtensor, values)) else None

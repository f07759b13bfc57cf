"""Methods of a backend about the states of models and optimizers; the defaults are those of full, replicated states."""

from abc import ABC
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from accel_backends.ops.dtensor import full_optimizer_state, full_state
from accel_backends.ops.fqn import named_parameters
from accel_backends.ops.state_dicts import (
    load_model_state,
    load_optimizer_state,
    model_state,
    optimizer_state,
    state_templates,
)
from accel_precision.scaler import gradient_marks

if TYPE_CHECKING:
    from accel_backends.core.config import BackendConfig, WholeForm
    from accel_state.session import Session

_NOTHING: AbstractContextManager[None] = nullcontext()


class BackendStates(ABC):
    """Base of ``Backend`` that saves, loads and exposes the states of models and optimizers."""

    session: "Session"
    config: "BackendConfig"

    def sync_buffers(self, models: Iterable[nn.Module]) -> None:
        """Copies rank 0's buffers to all ranks before a save, if training equalises them only later.

        Default: nothing, because there is one replica.

        Collective: every rank of the group must call this.
        """

    def gradient_marks(self, model: nn.Module) -> object:
        """Returns a value that changes when a backward adds to the model's gradients.

        Default: ids and versions of ``grad``.
        """
        return gradient_marks(model.parameters())

    def unreduced_gradients(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """Returns this rank's unreduced gradients as full tensors, by FQN.

        Their mean over ``gradient_average`` ranks is the gradient. Default: ``grad`` of the parameters.

        Collective: every rank of the group must call this.
        """
        return {name: p.grad for name, p in named_parameters(model).items() if p.grad is not None}

    def full_gradients(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """Returns copies of the next step's gradients as full tensors, by FQN, without the backend's own loss scale.

        To be called after the last backward of an accumulation window. Default: copies of ``unreduced_gradients``.

        Collective: every rank of the group must call this.
        """
        return {name: held.detach().clone() for name, held in self.unreduced_gradients(model).items()}

    def set_unreduced_gradients(self, model: nn.Module, gradients: Mapping[str, torch.Tensor]) -> None:
        """Restores the gradients that ``unreduced_gradients`` returned, or any gradients with the same mean over ranks.

        Collective: every rank of the group must call this.
        """
        for name, parameter in named_parameters(model).items():
            held = gradients.get(name)
            parameter.grad = None if held is None else held.to(parameter.device, parameter.dtype)

    def model_state(self, model: nn.Module) -> dict[str, Any]:
        """Returns the model's state dict by FQN, see ``state_dicts``; sharded tensors stay sharded."""
        return model_state(model)

    def load_model_state(self, model: nn.Module, state: Mapping[str, Any], *, strict: bool = True) -> None:
        """Loads a model state that any backend saved at any world size.

        Raises:
            CheckpointMismatchError: the state is of another model.
        """
        load_model_state(model, state, strict=strict)

    def full_model_state(self, model: nn.Module, *, main_only: bool | None = None) -> dict[str, Any]:
        """Returns the model's state dict with full tensors. Collective: every rank of the group must call this.

        ``main_only``: if tensors are sharded, only rank 0 receives the state and other ranks an empty one; None: as the
        backend's options say. Default: the form in the options; without a form, every rank returns its own full
        tensors.
        """
        return self._handed_out(full_state, self.model_state(model), self.config.state_form, main_only)

    def full_parameters(self, model: nn.Module, *, writeback: bool = True) -> AbstractContextManager[None]:
        """Context in which parameters are full tensors; changes persist if ``writeback``.

        Default: they always are and do.
        """
        return _NOTHING

    def optimizer_state(self, optimizer: Optimizer, models: Sequence[nn.Module]) -> dict[str, Any]:
        """Returns the optimizer's state dict by FQN, see ``state_dicts``."""
        return optimizer_state(optimizer, models)

    def full_optimizer_state(
        self, optimizer: Optimizer, models: Sequence[nn.Module], *, main_only: bool | None = None
    ) -> dict[str, Any]:
        """Returns the optimizer's state dict with full tensors. Collective: every rank of the group must call this.

        Default: as ``full_model_state``.
        """
        form = self.config.optimizer_state_form
        return self._handed_out(full_optimizer_state, self.optimizer_state(optimizer, models), form, main_only)

    def state_templates(self, optimizer: Optimizer, models: Sequence[nn.Module]) -> dict[str, torch.Tensor]:
        """Returns, by FQN, tensors placed as the optimizer's state of the parameter is. Default: the parameters."""
        return state_templates(optimizer, models)

    def load_optimizer_state(self, optimizer: Optimizer, models: Sequence[nn.Module], state: Mapping[str, Any]) -> None:
        """Loads an optimizer state that any backend saved at any world size.

        Raises:
            CheckpointMismatchError: the state is of other parameters.
        """
        load_optimizer_state(optimizer, models, state)

    def _handed_out(
        self,
        gather: Callable[..., dict[str, Any]],
        state: dict[str, Any],
        form: "WholeForm | None",
        main_only: bool | None,
    ) -> dict[str, Any]:
        if form is None:
            return state
        main_only = form.rank0_only if main_only is None else main_only
        return gather(state, keep=not main_only or self.session.rank == 0, host=form.offload_to_cpu)

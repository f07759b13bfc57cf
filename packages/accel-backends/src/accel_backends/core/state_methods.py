"""Methods of a backend about the states of models and optimizers; the defaults are those of full, replicated ones."""

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
    """The part of ``Backend`` that saves, loads and shows what a model and its optimizer hold."""

    session: "Session"
    config: "BackendConfig"

    def sync_buffers(self, models: Iterable[nn.Module]) -> None:
        """Makes buffers equal on all ranks before they are saved, where training makes them equal only later.

        Collective where it does anything. Default: there is one copy.
        """

    def gradient_marks(self, model: nn.Module) -> object:
        """What changes when a backward adds to the gradients of a model. Default: the writes to those of parameters."""
        return gradient_marks(model.parameters())

    def unreduced_gradients(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """Gradients of an accumulation window that is still open, whole, by parameter name: this rank's share.

        Averaged over ``gradient_average`` ranks, shares make the gradient. Collective. Default: what parameters hold.
        """
        return {name: p.grad for name, p in named_parameters(model).items() if p.grad is not None}

    def full_gradients(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """Copies of the next step's gradients, whole, by parameter name, without a loss scale of the backend's own.

        Collective; to be called after the last backward of a window. Default: of what ``unreduced_gradients`` gives.
        """
        return {name: held.detach().clone() for name, held in self.unreduced_gradients(model).items()}

    def set_unreduced_gradients(self, model: nn.Module, gradients: Mapping[str, torch.Tensor]) -> None:
        """Puts back what ``unreduced_gradients`` gave, or any shares with that average; collective."""
        for name, parameter in named_parameters(model).items():
            held = gradients.get(name)
            parameter.grad = None if held is None else held.to(parameter.device, parameter.dtype)

    def model_state(self, model: nn.Module) -> dict[str, Any]:
        """The model's state under its own names, see ``states``; sharded tensors stay sharded."""
        return model_state(model)

    def load_model_state(self, model: nn.Module, state: Mapping[str, Any], *, strict: bool = True) -> None:
        """Loads a state of any backend and world size.

        Raises:
            CheckpointMismatchError: it is another model's.
        """
        load_model_state(model, state, strict=strict)

    def full_model_state(self, model: nn.Module, *, main_only: bool | None = None) -> dict[str, Any]:
        """The model's state in full tensors; collective.

        ``main_only``: only rank 0 gets it where it has to be put together, and the others get an empty one; None: as
        the backend's options say. Default: in the options' form; where they have none, every rank has it, and gets it.
        """
        return self._handed_out(full_state, self.model_state(model), self.config.state_form, main_only)

    def full_parameters(self, model: nn.Module, *, writeback: bool = True) -> AbstractContextManager[None]:
        """Within it, parameters are whole; changes last if ``writeback``. Default: they always are and do."""
        return _NOTHING

    def optimizer_state(self, optimizer: Optimizer, models: Sequence[nn.Module]) -> dict[str, Any]:
        """The optimizer's state by parameter names, see ``states``."""
        return optimizer_state(optimizer, models)

    def full_optimizer_state(
        self, optimizer: Optimizer, models: Sequence[nn.Module], *, main_only: bool | None = None
    ) -> dict[str, Any]:
        """The optimizer's state in full tensors; collective. Default: as ``full_model_state``."""
        form = self.config.optimizer_state_form
        return self._handed_out(full_optimizer_state, self.optimizer_state(optimizer, models), form, main_only)

    def state_templates(self, optimizer: Optimizer, models: Sequence[nn.Module]) -> dict[str, torch.Tensor]:
        """By parameter name, a tensor placed as the optimizer's states of it are. Default: the parameters."""
        return state_templates(optimizer, models)

    def load_optimizer_state(self, optimizer: Optimizer, models: Sequence[nn.Module], state: Mapping[str, Any]) -> None:
        """Loads a state of any backend and world size.

        Raises:
            CheckpointMismatchError: it is that of other parameters.
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

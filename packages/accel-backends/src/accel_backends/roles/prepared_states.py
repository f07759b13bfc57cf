"""States of prepared models and optimizers by name, as a checkpoint holds them: saved, compared and loaded."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

import torch
from torch import nn

from accel_backends.ops.fqn import few
from accel_backends.ops.state_dicts import STATE, names_stored
from accel_backends.roles.composite_tensors import (
    check_inner_tensors,
    inner_aliases,
    load_inner_tensors,
    with_inner_tensors,
)
from accel_backends.roles.saved_state_check import PartReport, check_model, check_optimizer, fitted_optimizer
from accel_state.errors import CheckpointMismatchError

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from accel_backends.core.backend import Backend


@final
@dataclass(frozen=True, slots=True)
class ModelState:
    """A prepared model under the names of its own parameters and buffers, whatever wraps it."""

    backend: "Backend"
    model: nn.Module
    strict: bool = True

    def state_dict(self) -> dict[str, torch.Tensor]:
        return with_inner_tensors(self.backend.states.model(self.model))

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        strict = self.strict
        if any(isinstance(value, str) for value in state.values()):  # perhaps classes of tensors that consist of others
            own = self.state_dict()
            left = load_inner_tensors(own, state, inner_aliases(own, names_stored(self.model)))
            # ``check`` has compared the names; tensors that consist of others are not left.
            strict, state = strict and len(left) == len(state), left
        self.backend.states.load_model(self.model, state, strict=strict)

    def check(self, name: str, own: Mapping[str, Any], saved: Mapping[str, Any]) -> PartReport:
        """Raises CheckpointMismatchError unless ``saved``, tensors without values, fits ``own``, the state now.

        Of tensors that ``is_packed`` names the values are compared, where ``saved`` has them.
        """
        others = self.backend.states.elsewhere(self.model)
        here = {key: value for key, value in saved.items() if key not in others}
        aliases = inner_aliases(own, names_stored(self.model))
        check_inner_tensors(name, own, here, aliases)
        return check_model(name, own, aliases, here, strict=self.strict)


@final
@dataclass(frozen=True, slots=True)
class OptimizerState:
    """A prepared optimizer under parameter names, so that it loads into any backend at any world size."""

    backend: "Backend"
    optimizer: "Optimizer"
    models: Sequence[nn.Module]
    strict: bool = True

    def state_dict(self) -> dict[str, Any]:
        return dict(self.backend.states.optimizer(self.optimizer, self.models))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if not self.strict:
            state = fitted_optimizer(self.state_dict(), state)
        self.backend.states.load_optimizer(self.optimizer, self.models, state)

    def check(self, name: str, own: Mapping[str, Any], saved: Mapping[str, Any]) -> PartReport:
        """Raises CheckpointMismatchError unless ``saved``, tensors without values, fits ``own``, the state now."""
        report = check_optimizer(name, type(self.optimizer).__name__, own, saved, strict=self.strict)
        new = [one for one in report.missing if one not in own[STATE]]
        if new and saved[STATE] and not self.backend.capabilities.optimizer_states_of_some:
            raise CheckpointMismatchError(
                f"{self.backend.name} keeps states of all of an optimizer's parameters or of none, and the "
                f"checkpoint's {name} has them not of {few(new)}; load it without: load_state(strict=False, parts=...)"
            )
        return report

    def placement(self) -> Callable[[tuple[Any, ...], torch.dtype, tuple[int, ...]], torch.Tensor | None]:
        """Where a saved tensor belongs that this optimizer does not have yet: with its parameter, if as large."""
        parameters = self.backend.states.templates(self.optimizer, self.models)

        def place(path: tuple[Any, ...], dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor | None:
            parameter = parameters.get(path[1]) if len(path) == 3 and path[0] == STATE else None
            return parameter if parameter is not None and tuple(parameter.shape) == shape else None

        return place

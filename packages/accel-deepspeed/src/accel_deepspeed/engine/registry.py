"""Registry of the engines of one process, searched by model, optimizer, parameters or loss."""

from collections.abc import Iterable, Iterator
from typing import final

import torch
from torch import nn
from torch.optim import Optimizer

from accel_backends.core.ownership import Ownership
from accel_backends.ops.fqn import innermost
from accel_deepspeed.engine.engine import Prepared, engine_of_graph
from accel_deepspeed.engine.moe import check_experts_are_alike
from accel_state.errors import BackendError, PrepareError


@final
class Engines:
    """All prepared engines, in order of preparation."""

    def __init__(self) -> None:
        self._all: list[Prepared] = []

    def __iter__(self) -> Iterator[Prepared]:
        return iter(self._all)

    def add(self, prepared: Prepared) -> None:
        """Appends an engine."""
        self._all.append(prepared)

    def release(self, models: Iterable[nn.Module]) -> None:
        """Destroys the engines of these models."""
        inner = {id(innermost(model)) for model in models}
        for prepared in [one for one in self._all if id(innermost(one.engine)) in inner]:
            self._all.remove(prepared)
            prepared.release()

    def clear(self) -> None:
        """Destroys all engines."""
        for prepared in self._all:
            prepared.release()
        self._all.clear()

    def find(self, model: nn.Module) -> Prepared | None:
        """Returns the engine of a model; None if it has none."""
        inner = innermost(model)
        return next((one for one in self._all if innermost(one.engine) is inner), None)

    def find_stated(self, model: nn.Module) -> Prepared | None:
        """As ``find``, for saving or loading states; first copies edits of parameters into the master weights.

        Raises:
            BackendError: ranks have different parameters under the same names, or see ``Edits.carry``.
        """
        prepared = self.find(model)
        if prepared is not None:
            prepared.edits.carry()
            check_experts_are_alike(innermost(prepared.engine))
        return prepared

    def of_optimizer(self, optimizer: Optimizer) -> Prepared:
        """Returns the engine that contains an optimizer.

        Raises:
            BackendError: the optimizer is in no engine.
        """
        for prepared in self._all:
            if prepared.optimizer is optimizer:
                return prepared
        raise BackendError(f"this {type(optimizer).__name__} belongs to no engine; prepare it together with its model")

    def of_parameters(
        self, parameters: torch.Tensor | Iterable[torch.Tensor], owned: Ownership, what: str
    ) -> tuple[Prepared, frozenset[int] | None]:
        """Returns the engine of these parameters, and their ids; None if they are all of its trainable parameters.

        Raises:
            BackendError: parameters of no engine or of several; ``what`` names the call.
        """
        listed = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        ids = frozenset(map(id, listed))
        for prepared in self._all:
            if prepared.gradients is None or not ids <= prepared.gradients.parameters.keys():
                continue
            trained = prepared.gradients.parameters
            left_out = trained.keys() - ids if len(ids) < len(trained) else ()
            return prepared, ids if any(trained[key].requires_grad for key in left_out) else None
        owned.checked(listed)  # raises if some are of no model
        raise BackendError(f"{what} was given parameters of several models or of none that trains; call it for each")

    def used(self, loss: torch.Tensor) -> list[Prepared]:
        """Returns the engines that a loss depends on.

        Raises:
            PrepareError: no engine trains.
        """
        trained = [one for one in self._all if one.gradients is not None]
        if len(trained) == 1:
            return trained
        open_ = [one for one in trained if one.open]
        if len(open_) > 1:
            open_ = engine_of_graph(open_, loss) or open_
        chosen = open_[:1] if len(open_) == 1 else open_ or trained[:1]
        if not chosen:
            raise PrepareError("backward with strategy 'deepspeed' needs a model that was prepared with its optimizer")
        return chosen

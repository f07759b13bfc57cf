"""Gradients of models that ``fully_shard`` has sharded."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, final

import torch
from torch import nn
from torch.optim import Optimizer

from accel_backends.fsdp.collectives import agreed_all_gathers
from accel_backends.fsdp.shard import ShardedModels, rest
from accel_backends.fsdp.unreduced_gradients import (
    drop_gradients,
    drop_unreduced,
    scale_unreduced,
    set_unreduced_gradients,
    unreduced_gradients,
)
from accel_backends.ops.fqn import innermost
from accel_backends.roles.gradients import NOTHING, ReplicatedGradients

if TYPE_CHECKING:
    from accel_backends.core.backend import Backend


@final
class DTensorGradients(ReplicatedGradients):
    """Gradients as DTensors, averaged over all ranks; ``sharded``: the models that the backend has sharded."""

    def __init__(self, backend: "Backend", sharded: ShardedModels) -> None:
        super().__init__(backend, ranks=backend.session.world_size)
        self._sharded = sharded

    def unreduced(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """Returns unreduced gradients plus those reduced earlier in the window, as full tensors by FQN."""
        rest(self._sharded, [model])
        return unreduced_gradients(model)

    def set_unreduced(self, model: nn.Module, gradients: Mapping[str, torch.Tensor]) -> None:
        """Reduces the given gradients at once; later backwards of the accumulation window add to the result."""
        rest(self._sharded, [model])
        set_unreduced_gradients(model, gradients, group=self.run.session.group)

    def scale(self, models: Iterable[nn.Module], factor: float | torch.Tensor) -> None:
        """Multiplies the accumulated gradients, those that torch has not reduced yet included."""
        models = list(models)
        rest(self._sharded, models)
        super().scale(models, factor)
        for model in models:
            scale_unreduced(model, factor)

    def reduce(self, model: nn.Module) -> None:
        """Reduces the full gradients that torch keeps unreduced on each rank."""
        self.set_unreduced(model, self.unreduced(model))
        sharded = self._sharded.get(innermost(model))
        if sharded is not None and sharded.replicated:
            sharded.replicated.average()

    def drop(self, model: nn.Module) -> None:
        """Drops gradients, those that torch has not reduced yet included."""
        rest(self._sharded, [model])
        drop_gradients(model)

    def clear_unreduced(self, optimizer: Optimizer) -> None:
        """Drops the full gradients of the optimizer's parameters that torch keeps unreduced on each rank."""
        ids = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        for root in self._sharded:
            drop_unreduced(root, ids)

    def trial(self, model: nn.Module, agree: Callable[[], None]) -> AbstractContextManager[Any]:
        """Context of a step that may fail on some ranks: they agree before each all-gather of a unit."""
        root = innermost(model)
        if root not in self._sharded:
            return NOTHING
        if not hasattr(root, "reset_iter_state"):  # torch before 2.13
            return super().trial(model, agree)
        return agreed_all_gathers(root, agree)

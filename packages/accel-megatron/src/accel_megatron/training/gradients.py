"""Gradients in Megatron-LM's buffers, for the backend's role."""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, final

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from accel_backends import ReplicatedGradients
from accel_backends.ops.fqn import named_parameters
from accel_megatron.training.gathering import (
    full_tensors,
    local_tensors,
    mean_over_model_ranks,
    norm_over_ranks,
    on_expert_ranks,
    place,
)
from accel_megatron.training.stage import named_weights
from accel_precision.convert import accumulation_dtype
from accel_state.errors import BackendError

if TYPE_CHECKING:
    from accel_backends import Backend
    from accel_megatron.training.registry import MegatronEngines


@final
class MegatronGradients(ReplicatedGradients):
    """Gradients between backward and step: in buffers, averaged over data-parallel ranks when they are needed."""

    def __init__(self, backend: "Backend", engines: "MegatronEngines") -> None:
        super().__init__(backend, ranks=backend.run.parallelism.data_parallel_size)
        self._engines = engines

    def unscale(self, optimizers: Iterable[Optimizer]) -> None:
        """Averages gradients over ranks and divides them by the loss scale, once per optimizer and step.

        Raises:
            BackendError: gradients of a loss that was not scaled.
        """
        for optimizer in optimizers:
            self._engines.of_optimizer(optimizer).unscale()

    def clip_norm(
        self,
        parameters: Iterable[torch.Tensor],
        max_norm: float,
        norm_type: float = 2.0,
        *,
        error_if_nonfinite: bool = False,
    ) -> torch.Tensor:
        """Clips all gradients of the model whose parameters are given, to a joint 2-norm over all ranks.

        Collective: every rank of the group must call this.

        Raises:
            BackendError: parameters of no prepared model, only some of a model's, another norm than the 2-norm, or a
                norm that is not finite.
        """
        listed = self.owned.checked(parameters)
        optimizer = self._engines.optimizer_of_all(listed)
        self.unscale([optimizer.optimizer])
        norm = optimizer.clip(max_norm, norm_type)
        if error_if_nonfinite and not bool(norm.isfinite()):
            raise BackendError(f"the gradient norm (p={norm_type:g}) is {norm.item()}; gradients have nan or inf")
        return norm

    def clip_value(self, parameters: Iterable[torch.Tensor], clip_value: float) -> None:
        """Refuses: gradients are parts of buffers, and are clipped by their norm.

        Raises:
            BackendError: always.
        """
        raise BackendError("Megatron-LM's gradients are clipped by norm; nearest: clip_grad_norm_")

    def norm_so_far(
        self, parameters: "torch.Tensor | Iterable[torch.Tensor]", models: Iterable[nn.Module], norm_type: float = 2.0
    ) -> torch.Tensor:
        """Returns the 2-norm of this replica's gradients, before they are averaged over replicas.

        Collective: every rank of the group must call this.
        """
        from megatron.core import parallel_state

        models = list(models)
        first = self._engines.find(models[0])
        held = [
            (parameter, _of_replica(parameter))
            for model in models
            for parameter in named_weights(self._engines.find(model).chunks).values()
        ]
        norm = norm_over_ranks(held, parallel_state.get_model_parallel_group(), first.device)
        norm = norm.to(accumulation_dtype(first.core.params_dtype))
        return norm if self.loss_scale is None else norm / self.loss_scale.current

    def scale(self, models: Iterable[nn.Module], factor: float | torch.Tensor) -> None:
        """Multiplies the window's gradients."""
        for model in models:
            for buffer in self._engines.find(model).gradients.buffers:
                buffer.mul_(factor)

    def marks(self, model: nn.Module) -> object:
        """Returns the number of backwards."""
        return self._engines.find(model).gradients.backwards

    def unreduced(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """Returns this replica's gradients as full tensors, by FQN; empty without gradients.

        Collective: every rank of the group must call this.
        """
        engine = self._engines.find(model)
        if not engine.gradients.filled:
            return {}
        own = named_weights(engine.chunks)
        held = {name: gradient for name, p in own.items() if (gradient := _of_replica(p)) is not None}
        return full_tensors(engine.architecture, held, engine.device)

    def set_unreduced(self, model: nn.Module, gradients: Mapping[str, torch.Tensor]) -> None:
        """Restores the gradients that ``unreduced`` returned, or any gradients with the same mean over ranks.

        Collective: every rank of the group must call this.
        """
        engine = self._engines.find(model)
        engine.gradients.clear()
        shapes = {name: p.shape for name, p in named_parameters(engine.source).items()}
        # After a change of degrees, the ranks that compute one replica now may have the gradients of several.
        mean = mean_over_model_ranks(
            gradients, engine.architecture, shapes, engine.device, accumulation_dtype(engine.core.params_dtype)
        )
        if not mean:
            return
        own = named_weights(engine.chunks)
        for name, value in local_tensors(engine.architecture, mean).items():
            own[name].main_grad.copy_(value * expert_ranks(own[name]))
        engine.gradients.filled = True

    def reduce(self, model: nn.Module) -> None:
        """Does nothing: engines reduce when gradients are used."""

    def full(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """Returns the next step's gradients as full tensors, by FQN.

        Collective: every rank of the group must call this.
        """
        engine = self._engines.find(model)
        if engine.gradients.reduced and engine.optimizer is not None:
            return full_tensors(engine.architecture, engine.optimizer.gradients(), engine.device)
        total = self.unreduced(model)
        from megatron.core import parallel_state

        group = parallel_state.get_data_parallel_group()
        for value in total.values():
            dist.all_reduce(value, group=group)
            value.div_(group.size())
        return total

    def drop(self, model: nn.Module) -> None:
        """Drops the window's gradients."""
        self._engines.find(model).gradients.clear()


def expert_ranks(parameter: torch.Tensor) -> int:
    """Number of ranks whose tokens are in a parameter's gradient before it is averaged: those of its experts."""
    return place().expert_ranks if on_expert_ranks(parameter) else 1


def _of_replica(parameter: Any) -> torch.Tensor | None:
    """Returns a parameter's gradient of one replica, the mean of those whose tokens its experts compute."""
    gradient: torch.Tensor | None = getattr(parameter, "main_grad", None)
    count = expert_ranks(parameter)
    return gradient if gradient is None or count == 1 else gradient / count

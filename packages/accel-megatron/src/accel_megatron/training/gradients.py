"""Gradients in Megatron-LM's buffers, for the backend's role."""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, final

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from accel_backends import ReplicatedGradients
from accel_backends.ops.fqn import named_parameters
from accel_megatron.conversion.architecture import Architecture
from accel_megatron.training.gathering import (
    full_tensors,
    local_tensors,
    mean_over_model_ranks,
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
        engines = [self._engines.find(model) for model in models]
        total = torch.zeros((), dtype=torch.float64, device=engines[0].device)
        for engine in engines:
            for gradient in self.unreduced(engine).values():
                total += gradient.double().pow(2).sum()
        norm = total.sqrt().to(accumulation_dtype(engines[0].core.params_dtype))
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
        full = full_tensors(engine.architecture, _of_replica(named_weights(engine.chunks)), engine.device)
        _experts_of_replica(engine.architecture, full)
        return full

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
            share = _expert_share() if on_expert_ranks(own[name]) else 1 / _parts(own[name])
            own[name].main_grad.copy_(value * share)
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


def _of_replica(parameters: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Returns this rank's gradients by name, of all tokens of its replica; those of divided experts as they are.

    Context-parallel ranks have the gradients of their tokens, times their number; so have tensor-parallel ranks those
    of norms and routers under sequence parallelism, but not times their number.

    Collective: every rank of a stage of a replica must call this.
    """
    from megatron.core import parallel_state

    context = parallel_state.get_context_parallel_group()
    found: dict[str, torch.Tensor] = {}
    for name, parameter in parameters.items():
        gradient: torch.Tensor | None = getattr(parameter, "main_grad", None)
        if gradient is None:
            continue
        parts = _parts(parameter)
        if not on_expert_ranks(parameter) and (context.size() > 1 or parts > 1):
            gradient = gradient.clone()
            if context.size() > 1:
                dist.all_reduce(gradient, group=context)
                gradient.div_(context.size())
            if parts > 1:
                dist.all_reduce(gradient, group=parallel_state.get_tensor_model_parallel_group())
        found[name] = gradient
    return found


def _experts_of_replica(architecture: Architecture, full: dict[str, torch.Tensor]) -> None:
    """Makes full gradients of divided experts those of a replica, in place.

    Each rank passes those of the tokens of all ranks with the other experts; these may be of several replicas, whose
    mean it then gets, or only of some tokens of a replica.

    Collective: every rank of a stage of a replica must call this.
    """
    from megatron.core import parallel_state

    here = place()
    if here.expert_ranks == 1:
        return
    group = parallel_state.get_tensor_and_context_parallel_group()
    for name in sorted(architecture.stacks & full.keys()):
        if group.size() > 1:
            dist.all_reduce(full[name], group=group)
        full[name].div_(group.size() * _expert_share())


def _expert_share() -> float:
    """Number of replicas whose tokens the ranks with all experts have; below 1 for only some tokens of a replica.

    A context-parallel rank counts as a replica, because its gradients are times the number of these ranks.
    """
    from megatron.core import parallel_state

    ranks: int = parallel_state.get_expert_tensor_and_model_parallel_group().size()
    tensor: int = parallel_state.get_tensor_model_parallel_world_size()
    return ranks / tensor


def _parts(parameter: Any) -> int:
    """Number of ranks whose gradients of a parameter megatron-core sums, because each has other tokens."""
    from megatron.core import parallel_state

    marked = getattr(parameter, "sequence_parallel", False)
    return parallel_state.get_tensor_model_parallel_world_size() if marked else 1

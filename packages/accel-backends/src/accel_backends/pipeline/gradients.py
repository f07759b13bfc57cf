"""Gradients of models whose stages are on the ranks of a pipeline."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, final

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from accel_backends.ops.clip import (
    check_norm,
    check_norm_type,
    nonfinite,
    norm_of_held,
    norm_over,
    scale_down,
    total_norm,
)
from accel_backends.ops.dtensor import gathered, sharded_like
from accel_backends.ops.fqn import named_parameters
from accel_backends.parallel.pipeline.shards import StageShards
from accel_backends.pipeline.gather import gather_stages, mean_over_ranks
from accel_backends.pipeline.model import PipelinedModel
from accel_backends.roles.gradients import ReplicatedGradients
from accel_state.errors import BackendError, CollectiveError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from accel_backends.core.backend import Backend
    from accel_backends.pipeline.mesh import StageMesh


@final
class PipelineGradients(ReplicatedGradients):
    """Gradients of this rank's stages, averaged over data-parallel ranks with the same stages.

    Args:
        backend: as for the base class.
        models: the models that the backend has prepared.
        mesh: ranks of this rank's pipeline, and those that share its stages.
    """

    def __init__(self, backend: "Backend", models: Iterable[PipelinedModel], *, mesh: "StageMesh") -> None:
        # Ranks with other shards of the same sequences, too: ``data_parallel_size`` does not count these.
        super().__init__(backend, ranks=1 if mesh.data is None else dist.get_world_size(mesh.data))
        self._models, self._mesh, self._pipeline = models, mesh, mesh.pipeline

    @property
    def group(self) -> "ProcessGroup | None":
        """Ranks with the same stages and other samples."""
        return self._mesh.data

    def clip_norm(
        self,
        parameters: Iterable[torch.Tensor],
        max_norm: float,
        norm_type: float = 2.0,
        *,
        error_if_nonfinite: bool = False,
    ) -> torch.Tensor:
        """Clips unscaled gradients to their joint norm over all stages; a tied weight counts once.

        Collective: every rank of the group must call this.

        Raises:
            BackendError: parameters of no prepared model, a ``norm_type`` that is not positive, or a norm that is not
                finite.
        """
        check_norm_type(norm_type)
        own = self.owned.checked(parameters)
        again = self._counted_elsewhere()
        counted = [one.grad for one in own if one.grad is not None and id(one) not in again]
        norm = total_norm(counted, norm_type) if counted else torch.zeros(())
        total = self._over_stages(norm, norm_type)
        if error_if_nonfinite:
            check_norm(total, norm_type, lambda: nonfinite(own, self.owned.names))
        scale_down(own, total, max_norm)
        return total

    def norm_so_far(
        self, parameters: "torch.Tensor | Iterable[torch.Tensor]", models: Iterable[nn.Module], norm_type: float = 2.0
    ) -> torch.Tensor:
        """Returns the norm over all stages of this data-parallel rank's gradients, without the loss scale.

        Collective: every rank of the group must call this.
        """
        check_norm_type(norm_type)
        models = list(models)
        if not self._shards_of(models):
            total = self.clip_norm(parameters, math.inf, norm_type)
        else:
            again = self._counted_elsewhere()
            listed = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
            own = [one for one in listed if id(one) not in again]
            held = [(named_parameters(model), self._own(model)) for model in models]
            total = self._over_stages(norm_of_held(held, own, norm_type), norm_type)
        return total if self.loss_scale is None else total / self.loss_scale.current

    def unreduced(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """Returns the gradients of all stages of this data-parallel rank, by FQN."""
        return gather_stages(self._own(model), self._pipeline, self.run.session.device.torch)

    def set_unreduced(self, model: nn.Module, gradients: Mapping[str, torch.Tensor]) -> None:
        """Restores the mean over ranks of the given gradients, each rank those of its own stages."""
        mean = mean_over_ranks(gradients, self.run.session.group, self.run.session.device.torch)
        self.drop(model)
        for name, parameter in named_parameters(model).items():
            if name in mean:
                parameter.grad = sharded_like(mean[name].to(parameter.dtype), parameter)
        for known in self._models:
            if known is model:
                known.unreduced = bool(mean) and known.shards is None

    def reduce(self, model: nn.Module) -> None:
        """Averages the gradients of this rank's stages over the data-parallel ranks."""
        if self.ranks > 1:
            self.set_unreduced(model, self.unreduced(model))

    def full(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """Returns copies of the next step's gradients of all stages, by FQN."""
        return {name: gradient.detach().clone() for name, gradient in self.unreduced(model).items()}

    def drop(self, model: nn.Module) -> None:
        """Drops this rank's gradients, those that are not reduced yet included."""
        super().drop(model)
        for shards in self._shards_of([model]):
            shards.drop_gradients()

    def clear_unreduced(self, optimizer: Optimizer) -> None:
        """Drops the full gradients of the optimizer's parameters in stages that are sharded."""
        ids = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        for shards in self._shards_of(self._models):
            shards.drop_gradients(ids)

    def trial(self, model: nn.Module, agree: Callable[[], None]) -> AbstractContextManager[Any]:
        """Context of a step that may fail in some stages: the other ranks leave it with the rank that failed."""
        return _left_together(agree)

    def check_group(self, group: Mapping[str, Any]) -> None:
        """Refuses all parameter groups, because the other ranks would have to know their names."""
        raise BackendError(
            "add_param_group after prepare: each rank of a pipeline has other parameters, so a group would differ "
            "between ranks; add all groups before prepare, with requires_grad=False where they are not trained yet"
        )

    def _own(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """Full gradients of this rank's stages, those that are reduced already and those that are not together.

        Collective: every rank of the stage must call this.
        """
        found = {name: gathered(gradient) for name, gradient in super().unreduced(model).items()}
        for shards in self._shards_of([model]):
            for name, added in shards.full_gradients().items():
                full = gathered(added)
                found[name] = found[name] + full if name in found else full
        return found

    def _shards_of(self, models: Iterable[nn.Module]) -> list[StageShards]:
        return [one.shards for one in models if isinstance(one, PipelinedModel) and one.shards is not None]

    def _over_stages(self, norm: torch.Tensor, norm_type: float) -> torch.Tensor:
        """Joint norm of all stages, sent in one wide dtype, because stages may have gradients of different dtypes."""
        device = self.run.session.device.torch
        wide = norm.to(device, torch.float32 if device.type == "mps" else torch.float64)
        return norm_over([self._pipeline], wide, norm_type).to(norm.dtype)

    def _counted_elsewhere(self) -> set[int]:
        """Ids of the tied weights of the last stages, which the first stages count."""
        tied = [model.tied for model in self._models]
        return {id(one.parameter) for one in tied if one is not None and not one.is_first}


@contextmanager
def _left_together(agree: Callable[[], None]) -> Iterator[None]:
    """Makes ranks that learnt of another rank's error vote on the step, as that rank does."""
    try:
        yield
    except CollectiveError as error:
        if error.relayed:
            agree()
        raise

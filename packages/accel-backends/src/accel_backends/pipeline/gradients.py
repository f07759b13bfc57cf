"""Gradients of models whose stages are on the ranks of a pipeline."""

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, final

import torch
import torch.distributed as dist
from torch import nn

from accel_backends.ops.clip import check_norm, check_norm_type, nonfinite, norm_over, scale_down, total_norm
from accel_backends.pipeline.gather import gather_stages, mean_over_ranks
from accel_backends.pipeline.model import PipelinedModel
from accel_backends.roles.gradients import ReplicatedGradients
from accel_state.errors import BackendError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from accel_backends.core.backend import Backend


@final
class PipelineGradients(ReplicatedGradients):
    """Full gradients of this rank's stages, averaged over replicas of the pipeline.

    Args:
        backend: as for the base class.
        models: the models that the backend has prepared.
        group: ranks of this rank's pipeline.
        replicas: ranks with the same stages; None: there is one pipeline.
    """

    def __init__(
        self,
        backend: "Backend",
        models: Iterable[PipelinedModel],
        *,
        group: "ProcessGroup",
        replicas: "ProcessGroup | None",
    ) -> None:
        super().__init__(backend, ranks=1 if replicas is None else dist.get_world_size(replicas))
        self._models, self._pipeline, self._replicas = models, group, replicas

    @property
    def group(self) -> "ProcessGroup | None":
        """Ranks with the same stages."""
        return self._replicas

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
        device = self.run.session.device.torch
        # Wide, because stages may have gradients of different dtypes, and every rank has to send the same one.
        wide = norm.to(device, torch.float32 if device.type == "mps" else torch.float64)
        total = norm_over([self._pipeline], wide, norm_type).to(norm.dtype)
        if error_if_nonfinite:
            check_norm(total, norm_type, lambda: nonfinite(own, self.owned.names))
        scale_down(own, total, max_norm)
        return total

    def norm_so_far(
        self, parameters: "torch.Tensor | Iterable[torch.Tensor]", models: Iterable[nn.Module], norm_type: float = 2.0
    ) -> torch.Tensor:
        """Returns the norm over all stages of this replica's gradients, without the loss scale.

        Collective: every rank of the group must call this.
        """
        norm = self.clip_norm(parameters, math.inf, norm_type)
        return norm if self.loss_scale is None else norm / self.loss_scale.current

    def unreduced(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """Returns the gradients of all stages of this replica, by FQN."""
        own = super().unreduced(model)
        return gather_stages(own, self._pipeline, self.run.session.device.torch)

    def set_unreduced(self, model: nn.Module, gradients: Mapping[str, torch.Tensor]) -> None:
        """Restores the mean over this rank's pipeline of the given gradients, each rank those of its own stages."""
        mean = mean_over_ranks(gradients, self._pipeline, self.run.session.device.torch)
        super().set_unreduced(model, mean)
        for known in self._models:
            if known is model:
                known.unreduced = bool(mean)

    def full(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """Returns copies of the next step's gradients of all stages, by FQN."""
        return {name: gradient.detach().clone() for name, gradient in self.unreduced(model).items()}

    def check_group(self, group: Mapping[str, Any]) -> None:
        """Refuses all parameter groups, because the other ranks would have to know their names."""
        raise BackendError(
            "add_param_group after prepare: each rank of a pipeline has other parameters, so a group would differ "
            "between ranks; add all groups before prepare, with requires_grad=False where they are not trained yet"
        )

    def _counted_elsewhere(self) -> set[int]:
        """Ids of the tied weights of the last stages, which the first stages count."""
        tied = [model.tied for model in self._models]
        return {id(one.parameter) for one in tied if one is not None and not one.is_first}

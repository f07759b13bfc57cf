"""Average of the gradients of a pipeline's replicas after each backward."""

from typing import Any, final
from weakref import ref

import torch
import torch.distributed as dist

from accel_backends.ops.averaging import average_tensors
from accel_backends.pipeline.model import PipelinedModel


@final
class ReplicaReduction:
    """Averages a model's gradients over the replicas of its pipeline; ``group``: ranks with the same stages."""

    def __init__(self, model: PipelinedModel, group: Any) -> None:
        self._model, self._group = ref(model), group

    @property
    def model(self) -> PipelinedModel | None:
        """The model; None if it has been deleted."""
        return self._model()

    def prepare(self, loss: torch.Tensor) -> None:
        """Does nothing: the gradients of replicas are averaged after the backward."""

    def finish(self) -> None:
        """Averages the gradients, unless the backward added none, or ran under ``no_sync``.

        The mean of gradients that are means already and of later ones is the mean of all. A parameter that another
        replica has used gets a gradient here too.

        Collective: every rank of the group must call this.
        """
        model = self._model()
        if model is None or not model.reduced or not model.unreduced:
            return
        model.unreduced = False
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        used = torch.tensor([parameter.grad is not None for parameter in trained], dtype=torch.int32)
        used = used.to(model.pipeline.plan.device)
        dist.all_reduce(used, op=dist.ReduceOp.MAX, group=self._group)
        for parameter, anywhere in zip(trained, used.tolist(), strict=True):
            if anywhere and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        average_tensors([parameter.grad for parameter in trained if parameter.grad is not None], self._group)

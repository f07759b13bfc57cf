"""Gradients of models in DistributedDataParallel."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, final
from weakref import ref

from torch import nn
from torch.optim import Optimizer

from accel_backends.ddp.find import find_ddp
from accel_backends.ops.averaging import average_tensors
from accel_backends.roles.gradients import NOTHING, ReplicatedGradients

if TYPE_CHECKING:
    from accel_backends.core.backend import Backend


@final
class DDPGradients(ReplicatedGradients):
    """Full gradients, averaged over all ranks; ``optimizers``: those that ``join`` keeps equal."""

    def __init__(self, backend: "Backend", optimizers: Sequence[ref[Optimizer]]) -> None:
        super().__init__(backend, ranks=backend.session.world_size)
        self._optimizers = optimizers

    def join(self, models: Sequence[nn.Module], *, enable: bool = True) -> AbstractContextManager[Any]:
        """torch's Join over the DDP models; afterwards weights, optimizers and loss scale are equal on all ranks."""
        wrapped = [found for model in models if (found := find_ddp(model)) is not None]
        if not wrapped or not enable:
            return NOTHING
        from accel_backends.ddp.uneven_inputs import joined

        held = {id(parameter) for model in wrapped for parameter in model.parameters()}
        optimizers = [
            o
            for known in self._optimizers
            if (o := known()) is not None and any(id(p) in held for g in o.param_groups for p in g["params"])
        ]
        return joined(wrapped, optimizers, self.loss_scale)

    def average_parameters(self, model: nn.Module) -> None:
        """Averages the trainable parameters with one all-reduce per dtype and device."""
        tensors = [parameter.data for parameter in model.parameters() if parameter.requires_grad]
        average_tensors(tensors, self.run.session.group)

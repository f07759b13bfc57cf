"""Gradients of models in DistributedDataParallel."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, final
from weakref import ref

import torch
from torch import nn
from torch.optim import Optimizer

from accel_backends.ddp.find import find_ddp
from accel_backends.ddp.reduction import BareReduction, Reduction
from accel_backends.ops.averaging import average_tensors, brought_by_any
from accel_backends.ops.fqn import innermost, named_parameters, sparse_embeddings
from accel_backends.roles.gradients import NOTHING, ReplicatedGradients
from accel_state.errors import BackendError

if TYPE_CHECKING:
    from accel_backends.core.backend import Backend


@final
class DDPGradients(ReplicatedGradients):
    """Full gradients, averaged over all ranks.

    ``reductions``: those of the prepared models; ``optimizers``, ``schedulers``: those that ``join`` keeps equal.
    """

    def __init__(
        self,
        backend: "Backend",
        reductions: Sequence[Reduction | BareReduction],
        optimizers: Sequence[ref[Optimizer]],
        schedulers: Sequence[ref[Any]],
    ) -> None:
        super().__init__(backend, ranks=backend.session.world_size)
        self._reductions, self._optimizers, self._schedulers = reductions, optimizers, schedulers

    @torch.no_grad()
    def reduce(self, model: nn.Module) -> None:
        """Averages gradients; a parameter that has one on some ranks only counts as zero on the others."""
        own = find_ddp(model) or innermost(model)
        if not any(one.model is own for one in self._reductions):
            return
        brought = brought_by_any(self.unreduced(model), self.group)
        sparse = {id(module.weight) for _, module in sparse_embeddings(model)}
        means = []
        for name, parameter in named_parameters(model).items():
            if name in brought:
                if parameter.grad is None:
                    zero = torch.zeros_like(parameter)
                    parameter.grad = zero.to_sparse(1) if id(parameter) in sparse else zero
                means.append(parameter.grad)
        average_tensors(means, self.group)

    def set_unreduced(self, model: nn.Module, gradients: Mapping[str, torch.Tensor]) -> None:
        """As every backend; with ``find_unused_parameters`` averages them at once.

        Otherwise a parameter that no later backward of the window reaches would keep this rank's gradient, because the
        reducer then averages only what backwards since the last reduction have reached.
        """
        super().set_unreduced(model, gradients)
        wrapped = find_ddp(model)
        if wrapped is not None and wrapped.find_unused_parameters:
            self.reduce(model)

    def join(self, models: Sequence[nn.Module], *, enable: bool = True) -> AbstractContextManager[Any]:
        """torch's Join over the DDP models.

        Afterwards weights, optimizers, their schedulers and the loss scale are equal on all ranks.

        Raises:
            BackendError: a model trains that was frozen when it was prepared, and so is not in DDP.
        """
        wrapped = [found for model in models if (found := find_ddp(model)) is not None]
        if not wrapped or not enable:
            return NOTHING
        bare = [one.model for one in self._reductions if isinstance(one, BareReduction) and one.thawed]
        if bare:
            raise BackendError(
                f"join_uneven_inputs cannot average gradients of a {type(bare[0]).__name__} that was frozen when "
                "prepare was called; set requires_grad before prepare"
            )
        from accel_backends.ddp.uneven_inputs import joined

        held = {id(parameter) for model in wrapped for parameter in model.parameters()}
        optimizers = [
            o
            for known in self._optimizers
            if (o := known()) is not None and any(id(p) in held for g in o.param_groups for p in g["params"])
        ]
        schedulers = [
            s
            for known in self._schedulers
            if (s := known()) is not None
            and any(getattr(s.optimizer, "param_groups", None) is o.param_groups for o in optimizers)
        ]
        return joined(wrapped, optimizers, schedulers, self.loss_scale)

    def average_parameters(self, model: nn.Module) -> None:
        """Averages the trainable parameters with one all-reduce per dtype and device."""
        tensors = [parameter.data for parameter in model.parameters() if parameter.requires_grad]
        average_tensors(tensors, self.run.session.group)

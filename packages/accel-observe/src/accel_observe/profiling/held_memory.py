"""Memory of one rank by part: what prepared models and optimizers hold between operations."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, final

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from accel_backends.ops.footprint import storage_bytes

if TYPE_CHECKING:
    from accel_backends import Backend


@final
@dataclass(frozen=True, slots=True)
class HeldMemory:
    """Bytes of one rank; of sharded tensors, of its shards.

    Attributes:
        parameters: parameters of all prepared models.
        gradients: gradients that exist at this moment.
        optimizer: optimizer states, master weights included.
        buffers: buffers of the models.
        reserved: buckets of DDP, and buffers that a backend keeps from step to step.
    """

    parameters: int
    gradients: int
    optimizer: int
    buffers: int
    reserved: int

    @property
    def total(self) -> int:
        """Sum of all parts."""
        return self.parameters + self.gradients + self.optimizer + self.buffers + self.reserved


def held_memory(
    backend: "Backend", models: Iterable[nn.Module], optimizers_of: Callable[[nn.Module], Iterable[Optimizer]]
) -> HeldMemory:
    """Measures what prepared models and their optimizers hold. Not a collective: any rank may call it."""
    models = list(models)
    parameters: list[torch.Tensor] = []
    gradients: list[torch.Tensor] = []
    states: list[torch.Tensor] = []
    reserved: list[torch.Tensor] = []
    buckets = 0
    for model in models:
        own = list(model.parameters())
        parameters += own
        gradients += [parameter.grad for parameter in own if parameter.grad is not None]
        replicas = [module for module in model.modules() if isinstance(module, DistributedDataParallel)]
        if replicas:
            # With gradient_as_bucket_view, gradients that exist are the buckets' own memory.
            views = all(module.gradient_as_bucket_view for module in replicas)
            buckets += sum(
                parameter.nbytes
                for parameter in own
                if parameter.requires_grad and not (views and parameter.grad is not None)
            )
        for optimizer in optimizers_of(model):
            held = backend.states.held(model, optimizer)
            parameters += held.parameters
            gradients += held.gradients
            states += held.optimizer
            reserved += held.reserved
    weights = storage_bytes(parameters)
    return HeldMemory(
        parameters=weights,
        gradients=storage_bytes(gradients),
        # An optimizer may update views of the model's own memory, which must not be counted twice.
        optimizer=storage_bytes([*parameters, *states]) - weights,
        buffers=storage_bytes(buffer for model in models for buffer in model.buffers()),
        reserved=storage_bytes(reserved) + buckets,
    )

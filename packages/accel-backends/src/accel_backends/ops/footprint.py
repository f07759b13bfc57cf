"""Tensors behind parameters, gradients and optimizer state of one rank, for measurements of memory."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self, final

import torch
from torch import nn
from torch.optim import Optimizer


@final
@dataclass(frozen=True, slots=True)
class Held:
    """Tensors that one rank keeps in memory; some of them may share memory.

    Attributes:
        parameters: parameters that the model computes with, or their shards.
        gradients: accumulated gradients.
        optimizer: optimizer state, master weights included.
        reserved: buffers that stay allocated from step to step.
    """

    parameters: Sequence[torch.Tensor]
    gradients: Sequence[torch.Tensor]
    optimizer: Sequence[torch.Tensor]
    reserved: Sequence[torch.Tensor] = ()

    @classmethod
    def of(cls, model: nn.Module, optimizer: Optimizer) -> Self:
        """Collects the tensors of the model's parameters, their ``grad`` and the optimizer's state."""
        parameters = list(model.parameters())
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        return cls(parameters, gradients, states_of(optimizer))


def states_of(optimizer: Optimizer) -> list[torch.Tensor]:
    """Returns the tensors of an optimizer's state."""
    return [v for state in optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor)]


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the distinct storages of tensors; of DTensors, of the local shard."""
    seen: dict[int, int] = {}
    for tensor in tensors:
        local: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        storage = local.untyped_storage()
        seen[storage.data_ptr()] = storage.nbytes()
    return sum(seen.values())

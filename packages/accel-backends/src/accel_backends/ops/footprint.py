"""The tensors of one rank behind parameters, gradients and the optimizer's state."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self, final

import torch
from torch import nn
from torch.optim import Optimizer


@final
@dataclass(frozen=True, slots=True)
class Held:
    """The tensors of one rank, some of which may share memory.

    Attributes:
        parameters: as the model computes with them (their shards).
        gradients: what has been accumulated.
        optimizer: the optimizer's state, copies of the parameters among it.
        reserved: buffers that stay from step to step.
    """

    parameters: Sequence[torch.Tensor]
    gradients: Sequence[torch.Tensor]
    optimizer: Sequence[torch.Tensor]
    reserved: Sequence[torch.Tensor] = ()

    @classmethod
    def of(cls, model: nn.Module, optimizer: Optimizer) -> Self:
        """Those that the model's parameters and the optimizer hold themselves."""
        parameters = list(model.parameters())
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        return cls(parameters, gradients, states_of(optimizer))


def states_of(optimizer: Optimizer) -> list[torch.Tensor]:
    """The tensors of an optimizer's state."""
    return [v for state in optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor)]

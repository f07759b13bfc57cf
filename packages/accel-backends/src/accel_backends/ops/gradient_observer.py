"""Observation of the gradients of an optimizer's next step, for diagnosis of anomalies."""

from collections.abc import Callable

import torch
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

#: Receives this rank's gradients (or shards of them) by the ids of the model's parameters.
Keep = Callable[[dict[int, torch.Tensor]], None]


def watch_steps(optimizer: Optimizer, keep: Keep) -> RemovableHandle:
    """Calls ``keep`` with the ``grad`` of the optimizer's parameters before each step; for torch's optimizers."""

    def before(stepping: Optimizer, args: object, kwargs: object) -> None:
        parameters = [one for group in stepping.param_groups for one in group["params"]]
        keep({id(parameter): parameter.grad for parameter in parameters if parameter.grad is not None})

    return optimizer.register_step_pre_hook(before)

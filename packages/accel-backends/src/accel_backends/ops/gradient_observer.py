"""The gradients of an optimizer's next step, for diagnosis of runs that went wrong."""

from collections.abc import Callable

import torch
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

#: Takes this rank's parts of gradients, by the ids of the model's parameters.
Keep = Callable[[dict[int, torch.Tensor]], None]


def watch_steps(optimizer: Optimizer, keep: Keep) -> RemovableHandle:
    """Calls ``keep`` before each step of an optimizer of torch's kind with what its parameters hold."""

    def before(stepping: Optimizer, args: object, kwargs: object) -> None:
        parameters = [one for group in stepping.param_groups for one in group["params"]]
        keep({id(parameter): parameter.grad for parameter in parameters if parameter.grad is not None})

    return optimizer.register_step_pre_hook(before)

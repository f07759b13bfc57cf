"""Search for the DistributedDataParallel wrapper within others."""

from typing import cast

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from accel_backends.ops.fqn import wrapped_name


def find_ddp(model: nn.Module) -> DistributedDataParallel | None:
    """Returns the DDP wrapper around a model, also within other wrappers (torch.compile); None without one."""
    while not isinstance(model, DistributedDataParallel):
        name = wrapped_name(model)
        if name is None:
            return None
        model = cast(nn.Module, model._modules[name])
    return model

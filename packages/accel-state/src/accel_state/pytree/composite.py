"""Tensors that consist of several others."""

from typing import TypeGuard

import torch


def is_composite(tensor: object) -> TypeGuard[torch.Tensor]:
    """Whether a tensor consists of other tensors, as quantized weights of torchao do; a DTensor is not one of them.

    Does not import ``torch.distributed.tensor``.
    """
    made_of_others = isinstance(tensor, torch.Tensor) and hasattr(type(tensor), "__tensor_flatten__")
    return made_of_others and not hasattr(tensor, "device_mesh")

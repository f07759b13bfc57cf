"""Tensors that consist of several others."""

from typing import TypeGuard

import torch


def is_composite(tensor: object) -> TypeGuard[torch.Tensor]:
    """Whether a tensor consists of other tensors, as quantized weights of torchao do; a DTensor is not one of them.

    Does not import ``torch.distributed.tensor``.
    """
    made_of_others = isinstance(tensor, torch.Tensor) and hasattr(type(tensor), "__tensor_flatten__")
    return made_of_others and not hasattr(tensor, "device_mesh")


def inner_tensors(tensor: object) -> dict[str, torch.Tensor]:
    """The tensors that a tensor consists of, by attribute, and those that these consist of; empty for other tensors."""
    if not is_composite(tensor) or tensor.is_nested:
        return {}
    names: list[str] = tensor.__tensor_flatten__()[0]  # type: ignore[attr-defined]
    found: dict[str, torch.Tensor] = {}
    for name in names:
        value = getattr(tensor, name)
        inner = inner_tensors(value)
        found |= {f"{name}.{attribute}": one for attribute, one in inner.items()} if inner else {name: value}
    return found

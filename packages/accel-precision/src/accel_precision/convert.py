"""Conversion of floating-point tensors inside nested containers to another dtype.

A container is rebuilt only if a tensor in it changed. Objects that are no known container are returned unchanged.
"""

import copy
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import fields, is_dataclass
from typing import Any, cast

import torch


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype of sums, norms and losses of values in ``dtype``: fp64 for fp64, otherwise fp32."""
    return torch.promote_types(dtype, torch.float32)


def converter(dtype: torch.dtype) -> Callable[[Any], Any]:
    """Returns a function that converts the tensors of a model's outputs to ``dtype``.

    If ``dtype`` is fp32 or wider, only narrower tensors are converted (a float64 output stays float64). If ``dtype`` is
    fp16 or bf16, every floating-point tensor of more than 8 bits is converted.
    """
    if dtype.itemsize <= 2:

        def changes(tensor: torch.Tensor) -> bool:
            return tensor.dtype != dtype and tensor.dtype.is_floating_point and tensor.dtype.itemsize > 1

    else:
        narrower = frozenset(d for d in (torch.float16, torch.bfloat16, torch.float32) if d.itemsize < dtype.itemsize)

        def changes(tensor: torch.Tensor) -> bool:
            return tensor.dtype in narrower

    def convert(data: Any) -> Any:
        if isinstance(data, torch.Tensor):
            return data.to(dtype) if changes(data) else data
        return _rebuilt(data, convert)

    return convert


def converted_inputs(
    args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the arguments of a call with every floating-point tensor in ``dtype``; 8-bit floats are left alone."""

    def convert(data: Any) -> Any:
        if isinstance(data, torch.Tensor):
            changes = data.dtype != dtype and data.dtype.is_floating_point and data.dtype.itemsize > 1
            return data.to(dtype) if changes else data
        return _rebuilt(data, convert)

    return tuple(convert(value) for value in args), {key: convert(value) for key, value in kwargs.items()}


def _rebuilt(data: Any, convert: Callable[[Any], Any]) -> Any:
    """Returns ``data`` with converted leaves, in a container of the same type; ``data`` itself if no leaf changed."""
    if isinstance(data, tuple):
        items = [convert(item) for item in data]
        if all(new is old for new, old in zip(items, data, strict=True)):
            return data
        return type(data)(*items) if hasattr(data, "_fields") else type(data)(items)
    if isinstance(data, list):
        items = [convert(item) for item in data]
        if all(new is old for new, old in zip(items, data, strict=True)):
            return data
        changed = copy.copy(data)
        changed[:] = items
        return changed
    if isinstance(data, Mapping):
        return _rebuilt_mapping(data, convert)
    if is_dataclass(data) and not isinstance(data, type):
        return _rebuilt_dataclass(data, convert)
    return data


def _rebuilt_mapping(data: Mapping[Any, Any], convert: Callable[[Any], Any]) -> Any:
    new = {key: convert(value) for key, value in data.items()}
    if all(new[key] is value for key, value in data.items()):
        return data
    if not isinstance(data, MutableMapping):
        return cast(Any, type(data))(new)
    changed = copy.copy(data)
    for key, value in new.items():
        if value is not data[key]:
            changed[key] = value
    return changed


def _rebuilt_dataclass(data: Any, convert: Callable[[Any], Any]) -> Any:
    old = {field.name: getattr(data, field.name) for field in fields(data) if hasattr(data, field.name)}
    new = {name: convert(value) for name, value in old.items()}
    if all(new[name] is value for name, value in old.items()):
        return data
    changed = copy.copy(data)
    for name, value in new.items():
        if value is not old[name]:
            object.__setattr__(changed, name, value)
    return changed

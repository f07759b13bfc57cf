"""Models without values: built on the meta device, or copied with fake tensors."""

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import nn

from accel_planner.errors import PlanError
from accel_precision.policy import PrecisionPolicy

Constructor = Callable[[], nn.Module]


@final
@dataclass(slots=True)
class Built:
    """A model to be profiled, and notes on how it was built."""

    model: nn.Module
    notes: list[str] = field(default_factory=list)


def build(source: "nn.Module | Constructor") -> Built:
    """Returns the model itself, or the model that a constructor builds on the meta device, where it takes no memory.

    A constructor that needs values (``.item()``, numpy, an explicit device) is called without the meta device, and a
    note says so.

    Raises:
        PlanError: both calls fail, or the result is not a module.
    """
    if isinstance(source, nn.Module):
        return Built(source)
    if not callable(source):
        raise PlanError(f"a {type(source).__name__} is no model; expected an nn.Module or a function that builds one")
    name = getattr(source, "__name__", type(source).__name__)
    notes: list[str] = []
    try:
        with torch.device("meta"):
            model = source()
    except Exception as problem:
        try:
            model = source()
        except Exception as error:
            raise PlanError(
                f"{name}() cannot build its model: on the meta device, {_first_line(problem)}; for real, "
                f"{_first_line(error)}. It has to work without arguments"
            ) from error
        notes.append(f"built with its values, because {name}() fails on the meta device: {_first_line(problem)}")
    if not isinstance(model, nn.Module):
        raise PlanError(f"{name}() gives a {type(model).__name__}; expected an nn.Module")
    return Built(model, notes)


def stored_dtype(parameter: nn.Parameter, policy: PrecisionPolicy, *, sharded: bool) -> torch.dtype:
    """Dtype in which a backend stores a parameter: the policy's, or fp32 if sharding upcasts half precision."""
    if not parameter.is_floating_point():
        return parameter.dtype
    if policy.params is not None:
        return policy.params
    widened = sharded and policy.autocast and parameter.requires_grad and parameter.dtype.itemsize == 2
    return torch.float32 if widened else parameter.dtype


def fake_copy(
    model: nn.Module,
    mode: AbstractContextManager[Any],
    dtype_of: Callable[[nn.Parameter], torch.dtype],
    policy: PrecisionPolicy,
) -> nn.Module:
    """Copies a model with fake tensors on the CPU; the model is not modified and no value is read.

    Args:
        dtype_of: returns the dtype of each parameter in the copy.

    Raises:
        PlanError: the model holds something that cannot be copied.
    """
    memo: dict[int, Any] = {}
    with mode:
        for parameter in model.parameters():
            fake = _empty(parameter, dtype_of(parameter))
            memo[id(parameter)] = nn.Parameter(fake, requires_grad=parameter.requires_grad)
        for module in model.modules():
            for buffer in module._buffers.values():
                if buffer is not None and id(buffer) not in memo:
                    wanted = policy.buffers if buffer.is_floating_point() else None
                    memo[id(buffer)] = _empty(buffer, wanted or buffer.dtype)
            for value in vars(module).values():
                if isinstance(value, torch.Tensor) and id(value) not in memo:
                    memo[id(value)] = _empty(value, value.dtype)
    try:
        with mode:
            copied = copy.deepcopy(model, memo)
    except Exception as error:
        raise PlanError(
            f"{type(model).__name__} cannot be copied to be looked at ({_first_line(error)}); give the planner a "
            "function that builds it instead"
        ) from error
    return copied.train(model.training)


def buffer_bytes(model: nn.Module, policy: PrecisionPolicy) -> int:
    """Bytes of the buffers in the dtypes that a backend keeps them in."""
    found = {id(buffer): buffer for buffer in model.buffers()}.values()
    return sum(b.numel() * ((policy.buffers or b.dtype) if b.is_floating_point() else b.dtype).itemsize for b in found)


def _empty(like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A fake tensor of the same size and strides; the full size for a sharded tensor."""
    return torch.empty_strided(tuple(like.shape), tuple(like.stride()), dtype=dtype, device="cpu")


def _first_line(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__

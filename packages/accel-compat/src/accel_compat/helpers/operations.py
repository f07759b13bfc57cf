"""Collectives with Accelerate's checks and messages."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from accel_compat.state.process_state import SharedPartialState
from accel_state.collectives import tensors
from accel_state.enums import DistributedType
from accel_state.errors import CollectiveMismatchError
from accel_state.pytree.operations import find_device, get_shape
from accel_state.pytree.structure import flatten, leaves_of, unflatten

MODULE = "accelerate.utils.operations"


def _verified(function: Callable[..., Any]) -> Callable[..., Any]:
    """In debug mode, compares devices and shapes of all processes before the collective."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        state = SharedPartialState()
        if state.debug and state.use_distributed:
            _compare(f"{MODULE}.{function.__name__}", kwargs.get("tensor", args[0] if args else None))
        return function(*args, **kwargs)

    return call


def _compare(operation: str, tensor: Any) -> None:
    state = SharedPartialState()
    device = find_device(tensor)
    if device is not None and device.type != state.device.type:
        raise CollectiveMismatchError(
            f"One or more of the tensors passed to {operation} were not on the {device.type} while the `Accelerator` is "
            f"configured for {state.device.type}. Please move it to the {state.device.type} before calling {operation}."
        )
    shapes = tensors.gather_object([get_shape(tensor)])
    if shapes.count(shapes[0]) == len(shapes):
        return
    listed = "\n  - ".join(f"Process {rank}: {shape}" for rank, shape in enumerate(shapes))
    raise CollectiveMismatchError(
        "Cannot apply desired operation due to shape mismatches. All shapes across devices must be valid."
        f"\n\nOperation: `{operation}`\nInput shapes:\n  - {listed}"
    )


@_verified
def gather(tensor: Any) -> Any:
    """All-gathers every tensor, concatenated along dim 0."""
    return tensors.gather(tensor, verify=False)


@_verified
def broadcast(tensor: Any, from_process: int = 0) -> Any:
    """Broadcasts every tensor of rank ``from_process`` in place."""
    return tensors.broadcast(tensor, from_process, verify=False)


@_verified
def reduce(tensor: Any, reduction: str = "mean", scale: float = 1.0) -> Any:
    """Reduces every tensor over the processes; ``"none"`` is the sum, and ``scale`` counts on XLA devices only.

    The sum of booleans says whether any is true.
    """
    on_xla = SharedPartialState().distributed_type == DistributedType.XLA
    reduction = "sum" if reduction == "none" else reduction
    reduced = tensors.reduce(tensor, reduction, scale if on_xla else 1.0, verify=False)
    if reduction != "sum":
        return reduced
    leaves, structure = flatten(reduced)
    dtypes = [getattr(one, "dtype", None) for one in leaves_of(tensor)]
    return unflatten(
        [new.bool() if dtype == torch.bool else new for new, dtype in zip(leaves, dtypes, strict=True)], structure
    )


def gather_object(object: Any) -> Any:
    """Returns the joined lists of all processes."""
    return tensors.gather_object(object) if SharedPartialState().use_distributed else object


def pad_across_processes(tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
    """Pads every tensor along ``dim`` to its longest length over all processes."""
    try:
        return tensors.pad_across_processes(tensor, dim, pad_index, pad_first, verify=SharedPartialState().debug)
    except CollectiveMismatchError as error:
        raise CollectiveMismatchError(
            f"Error found while calling `{MODULE}.pad_across_processes`. Please see the earlier error for more details."
        ) from error

"""Padding of tensors to the longest length over the ranks, or to a multiple of the number of processes."""

import warnings
from numbers import Number
from typing import TYPE_CHECKING, Any

import torch

from accel_state.collectives.group_argument import resolve
from accel_state.collectives.verify import is_verified, verify_collective
from accel_state.device.device import is_full
from accel_state.errors import CollectiveMismatchError
from accel_state.pytree.operations import recursively_apply, refill, tensor_leaves
from accel_state.watchdog.decorator import recorded

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class CannotPadNestedTensorWarning(UserWarning):
    """A nested tensor was returned unchanged, because its rows have no common length to pad to."""


@recorded("pad_across_processes")
def pad_across_processes(
    tensor: Any,
    dim: int = 0,
    pad_index: int | float = 0,
    pad_first: bool = False,
    *,
    group: "ProcessGroup | None" = None,
    verify: bool | None = None,
) -> Any:
    """Pads every leaf of ``tensor`` with ``pad_index`` along ``dim`` to its longest length over all ranks.

    Collective: every rank of the group must call this. Padding is appended, or prepended with ``pad_first``. Leaves
    without that dimension, and leaves that already have the longest length, are returned as the same objects. One
    all-reduce exchanges the lengths of all leaves.

    Raises:
        TypeError: a leaf is not a tensor, or ``pad_index`` is not a number.
        ValueError: a leaf needs padding and its dtype has no value ``pad_index`` (-100 in uint8); on every rank.
        CollectiveMismatchError: structure, dtype or number of dimensions differ between ranks (only with ``verify``).
    """
    world = resolve(group)
    if world is not None and is_verified(verify):
        try:
            verify_collective("pad_across_processes", tensor, world, arguments={"dim": dim}, exact_shapes=False)
        except CollectiveMismatchError as error:
            raise CollectiveMismatchError(
                "Error found while calling `accel.utils.operations.pad_across_processes`. Please see the earlier "
                f"error: {error}"
            ) from error
    leaves = tensor_leaves(tensor, "pad_across_processes")
    if not isinstance(pad_index, Number):
        raise TypeError(f"pad_index is {pad_index!r}; expected a number, not a {type(pad_index).__name__}")
    chosen = [index for index, leaf in enumerate(leaves) if _has_dim(leaf, dim) and not is_full(leaf)]
    if world is None or not chosen:
        return tensor
    padded = list(leaves)
    shortest, longest = _range([leaves[index].shape[dim] for index in chosen], leaves[chosen[0]].device, world)
    for index, least, length in zip(chosen, shortest, longest, strict=True):
        if least < length:  # on some rank: a value that cannot be padded with is refused on all
            _check_value(pad_index, leaves[index].dtype)
            padded[index] = pad_to(leaves[index], length, dim=dim, value=pad_index, first=pad_first)
    return refill(tensor, iter(padded))


def _has_dim(leaf: torch.Tensor, dim: int) -> bool:
    if leaf.is_nested:
        warnings.warn(
            "nested tensors cannot be padded across processes; this one is returned as it is",
            CannotPadNestedTensorWarning,
            stacklevel=4,
        )
        return False
    return -leaf.ndim <= dim < leaf.ndim


def _range(lengths: list[int], device: torch.device, group: "ProcessGroup") -> tuple[list[int], list[int]]:
    """Returns the least and the greatest of each length over the ranks."""
    import torch.distributed as dist

    mine = torch.tensor([[-length for length in lengths], lengths], dtype=torch.int64, device=device)
    dist.all_reduce(mine, dist.ReduceOp.MAX, group=group)
    negated, longest = mine.tolist()
    return [-length for length in negated], longest


def _check_value(value: Any, dtype: torch.dtype) -> None:
    """Checks that tensors of the dtype can hold a number; floating point may round it."""
    try:
        held = torch.full((), value, dtype=dtype, device="cpu").item()
    except RuntimeError:
        held = None
    if held is None or not (dtype.is_floating_point or dtype.is_complex or held == value):
        raise ValueError(
            f"pad_index={value!r} is no value of {str(dtype).removeprefix('torch.')}, the dtype of a tensor that needs "
            "padding; nearest: pad tensors of each dtype in a call of their own, or convert this one first"
        )


def pad_to(
    leaf: torch.Tensor, length: int, *, dim: int = 0, value: int | float = 0, first: bool = False
) -> torch.Tensor:
    """Pads ``leaf`` to ``length`` along ``dim`` with ``value``, at the end, or at the front if ``first``."""
    missing = length - leaf.shape[dim]
    if missing <= 0:
        return leaf
    shape = list(leaf.shape)
    shape[dim] = missing
    filling = leaf.new_full(shape, value)
    return torch.cat([filling, leaf] if first else [leaf, filling], dim=dim)


def pad_input_tensors(tensor: Any, batch_size: int, num_processes: int, dim: int = 0) -> Any:
    """Appends zeros along ``dim``, so that ``batch_size`` rows become a multiple of ``num_processes``.

    Leaves whose length along ``dim`` is not ``batch_size`` are not part of the batch and stay as they are.

    Raises:
        TypeError: a leaf is not a tensor.
    """
    if num_processes < 1:
        raise ValueError(f"num_processes={num_processes} cannot share a batch; expected 1 or more")
    length = batch_size + -batch_size % num_processes

    def pad(leaf: torch.Tensor) -> torch.Tensor:
        belongs = -leaf.ndim <= dim < leaf.ndim and leaf.shape[dim] == batch_size
        return pad_to(leaf, length, dim=dim) if belongs else leaf

    return recursively_apply(pad, tensor, error_on_other_type=True)

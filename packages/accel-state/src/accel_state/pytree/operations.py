"""Local operations on tensors nested in dicts, lists, tuples, namedtuples and dataclasses."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard, final

import torch

from accel_state.errors import CollectiveError
from accel_state.pytree.structure import LEAF as LEAF
from accel_state.pytree.structure import Structure as Structure
from accel_state.pytree.structure import (
    children,
    field_names,
    is_dataclass_instance,
    rebuild_dataclass,
    rebuild_mapping,
    unsupported_leaf,
)
from accel_state.pytree.structure import flatten as flatten
from accel_state.pytree.structure import honor_type as honor_type
from accel_state.pytree.structure import is_container as is_container
from accel_state.pytree.structure import is_namedtuple as is_namedtuple
from accel_state.pytree.structure import is_torch_tensor as is_torch_tensor
from accel_state.pytree.structure import leaves_of as leaves_of
from accel_state.pytree.structure import map_leaves as map_leaves
from accel_state.pytree.structure import recursively_apply as recursively_apply
from accel_state.pytree.structure import refill as refill
from accel_state.pytree.structure import unflatten as unflatten
from accel_state.pytree.structure import walk as walk


@final
@dataclass(frozen=True, slots=True)
class TensorInformation:
    """Shape and dtype of a tensor, without its values."""

    shape: torch.Size
    dtype: torch.dtype


def is_tensor_information(tensor_info: object) -> TypeGuard[TensorInformation]:
    """Whether ``tensor_info`` describes a tensor (see ``get_data_structure``)."""
    return isinstance(tensor_info, TensorInformation)


def send_to_device(
    tensor: Any,
    device: torch.device | str | int,
    non_blocking: bool = False,
    skip_keys: str | Sequence[str] | None = None,
) -> Any:
    """Moves every tensor in ``tensor`` to ``device``; returns the same objects where nothing had to move.

    Objects with a ``to`` method are moved by it (tokenizer outputs hold more than their tensors); a method that takes
    no ``non_blocking`` is called without it. Values of a mapping under ``skip_keys`` stay on their device.
    """
    if device == "npu":  # torch_npu takes no device without an index here
        device = "npu:0"
    skip = (skip_keys,) if isinstance(skip_keys, str) else tuple(skip_keys or ())
    return _send(tensor, device, non_blocking, skip)


def _send(data: Any, device: Any, non_blocking: bool, skip: tuple[str, ...]) -> Any:
    if isinstance(data, torch.Tensor):
        return data.to(device, non_blocking=non_blocking)
    if isinstance(data, Mapping):
        if not skip and hasattr(data, "to"):
            return _move(data, device, non_blocking)
        values = {k: v if k in skip else _send(v, device, non_blocking, skip) for k, v in data.items()}
        return data if _all_same(data.values(), values.values()) else rebuild_mapping(data, values)
    if hasattr(data, "to") and not isinstance(data, type):
        return _move(data, device, non_blocking)
    if isinstance(data, (list, tuple)):
        items = [_send(value, device, non_blocking, skip) for value in data]
        return data if _all_same(data, items) else honor_type(data, items)
    if is_dataclass_instance(data):
        old = [getattr(data, name) for name in field_names(data)]
        new = [_send(value, device, non_blocking, skip) for value in old]
        return data if _all_same(old, new) else rebuild_dataclass(data, new)
    return data


def _move(data: Any, device: Any, non_blocking: bool) -> Any:
    if not non_blocking:
        return data.to(device)
    try:
        return data.to(device, non_blocking=True)
    except TypeError:  # this ``to`` accepts only a device
        return data.to(device)


def _all_same(old: Any, new: Any) -> bool:
    return all([a is b for a, b in zip(old, new, strict=True)])


def convert_to_fp32(tensor: Any) -> Any:
    """Converts float16 and bfloat16 leaves to float32; other leaves stay as they are."""
    return recursively_apply(torch.Tensor.float, tensor, test_type=_is_half)


def _is_half(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.dtype in (torch.float16, torch.bfloat16)


def get_data_structure(data: Any) -> Any:
    """Replaces each tensor in ``data`` by a ``TensorInformation``."""
    return recursively_apply(lambda leaf: TensorInformation(leaf.shape, leaf.dtype), data)


def initialize_tensors(data_structure: Any) -> Any:
    """Replaces each ``TensorInformation`` by an uninitialised CPU tensor: the inverse of ``get_data_structure``."""
    return recursively_apply(
        lambda info: torch.empty(info.shape, dtype=info.dtype), data_structure, test_type=is_tensor_information
    )


def get_shape(data: Any) -> Any:
    """Replaces each tensor in ``data`` by its shape as a list."""
    return recursively_apply(lambda leaf: list(leaf.shape), data)


def listify(data: Any) -> Any:
    """Replaces each tensor in ``data`` by nested Python lists (bfloat16 through float32)."""
    return recursively_apply(lambda leaf: (leaf.float() if leaf.dtype == torch.bfloat16 else leaf).tolist(), data)


def first_tensor(data: Any) -> torch.Tensor | None:
    """Returns the first tensor of a depth-first traversal of ``data``, or None."""
    if isinstance(data, torch.Tensor):
        return data
    for _, value in children(data) or ():
        found = first_tensor(value)
        if found is not None:
            return found
    return None


def find_device(data: Any) -> torch.device | None:
    """Returns the device of the first tensor in ``data``, or None if there is no tensor."""
    found = first_tensor(data)
    return None if found is None else found.device


def find_batch_size(data: Any) -> int | None:
    """Returns the size along dim 0 of the first leaf of ``data``, which must be a tensor.

    Raises ValueError for an empty container and for a tensor without dimensions, TypeError for any other leaf.
    """
    if isinstance(data, torch.Tensor):
        if data.ndim == 0:
            raise ValueError("cannot find the batch size of a tensor without dimensions (shape [])")
        return data.shape[0]
    parts = children(data)
    if parts is None:
        raise TypeError(f"Can only find the batch size of tensors but got {type(data)}.")
    for _, value in parts:
        return find_batch_size(value)
    raise ValueError(f"Cannot find the batch size from an empty {type(data)}.")


def ignorant_find_batch_size(data: Any) -> int | None:
    """Returns ``find_batch_size(data)``, or None if it raises ValueError or TypeError."""
    try:
        return find_batch_size(data)
    except (ValueError, TypeError):
        return None


def slice_tensors(
    data: Any, tensor_slice: Any, process_index: int | None = None, num_processes: int | None = None
) -> Any:
    """Indexes each tensor in ``data`` with ``tensor_slice``.

    The last two arguments exist for replacements of this function that slice by rank; this function ignores them.
    """
    return recursively_apply(lambda leaf: leaf[tensor_slice], data)


def concatenate(data: Any, dim: int = 0) -> Any:
    """Concatenates nested structures of the same form leaf by leaf along ``dim``.

    The only element of a list of one is returned unchanged. Raises TypeError for leaves that are not tensors,
    ValueError for different structures, RuntimeError (torch's) for shapes that do not match.
    """
    if len(data) == 0:
        raise ValueError("nothing to concatenate: expected a list with at least one nested structure")
    if len(data) == 1:
        return data[0]
    first, structure = flatten(data[0])
    columns = [first]
    for index, other in enumerate(data[1:], start=1):
        leaves, other_structure = flatten(other)
        if other_structure != structure:
            raise ValueError(
                f"element {index} has another structure than element 0: {_paths(other)} instead of {_paths(data[0])}"
            )
        columns.append(leaves)
    for leaf in (leaf for column in columns for leaf in column):
        if not isinstance(leaf, torch.Tensor):
            raise TypeError(f"Can only concatenate tensors but got {type(leaf)}")
    return unflatten([torch.cat(peers, dim=dim) for peers in zip(*columns, strict=True)], structure)


def _paths(data: Any) -> list[str]:
    return [path or "a single leaf" for path, _ in walk(data)]


def tensor_leaves(data: Any, operation: str) -> list[torch.Tensor]:
    """Returns the leaves of ``data`` for an operation between ranks, which the errors name.

    Raises:
        TypeError: a leaf is not a tensor.
        CollectiveError: a leaf is a DTensor of several ranks.
    """
    leaves = leaves_of(data)
    for leaf in leaves:
        if not isinstance(leaf, torch.Tensor):
            raise unsupported_leaf(leaf, operation)
        if (mesh := getattr(leaf, "device_mesh", None)) is not None and mesh.size() > 1:
            placements = getattr(leaf, "placements", ())
            raise CollectiveError(
                f"`{operation}` takes tensors that each rank has for itself; a leaf of shape {list(leaf.shape)} is a "
                f"DTensor on {mesh.size()} ranks, placed {placements}. Pass its `full_tensor()`, or its "
                "`to_local()` for this rank's part"
            )
    return leaves

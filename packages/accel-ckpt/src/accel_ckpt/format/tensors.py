"""Bytes and layout of a tensor: dtypes on disk, memory without copies, DTensors without importing them."""

import ctypes
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from accel_ckpt.format.shard_layout import Layout, Split, layout_left_to_right, layout_of, local_shape, whole
from accel_ckpt.private import shard_of
from accel_state.errors import CheckpointError
from accel_state.pytree.composite import is_composite

# dtype codes of safetensors headers (its specification); other dtypes are stored as bytes, see safetensors_file.py.
CODES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
}
BYTES = "U8"
# Array over all memory from an address on. One type for all sizes: making one takes longer than a small read.
_MEMORY = ctypes.c_ubyte * (2**62)
RAW = ("complex32", "complex64", "complex128", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu")


@dataclass(frozen=True, slots=True)
class Holding:
    """One rank's shard of a tensor: its memory, its layout in the full tensor, and the ranks with equal replicas."""

    local: torch.Tensor
    dtype: str
    shape: tuple[int, ...]
    layout: Layout
    ranks: tuple[int, ...] | None
    """None: every rank that has the name holds the full tensor (a plain tensor)."""

    @property
    def nbytes(self) -> int:
        elements = self.local.numel() if self.ranks is None else prod(local_shape(self.layout))
        return elements * self.local.element_size()


def dtype_name(dtype: torch.dtype) -> str:
    """Returns ``float32`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype | None:
    """Returns the torch dtype called ``name``; None if checkpoints cannot hold it."""
    return getattr(torch, name, None) if name in CODES or name in RAW else None


def as_dtensor(tensor: torch.Tensor) -> Any:
    """Returns ``tensor`` if it is a DTensor, otherwise None.

    Does not import ``torch.distributed.tensor``: if that module is not loaded, no DTensor can exist.
    """
    module = sys.modules.get("torch.distributed.tensor")
    return tensor if module is not None and isinstance(tensor, module.DTensor) else None


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Returns this rank's local tensor, detached."""
    dtensor = as_dtensor(tensor)
    if dtensor is None:
        return tensor.detach()
    local: torch.Tensor = shard_of(dtensor).detach()
    return local.wait() if hasattr(local, "wait") else local


def placement_key(tensor: torch.Tensor) -> object:
    """Returns a key that is equal for tensors with the same mesh and placements."""
    dtensor = as_dtensor(tensor)
    return None if dtensor is None else (dtensor.device_mesh, tuple(dtensor.placements))


def memory_key(tensor: torch.Tensor) -> object:
    """Returns a key that is equal for tensors at the same address; None on the meta device."""
    local = local_tensor(tensor)
    return None if local.device.type == "meta" else (str(local.device), local.data_ptr())


def hold(key: str, tensor: torch.Tensor, group_rank: Callable[[int], int]) -> Holding:
    """Describes this rank's shard of ``tensor``; ``group_rank`` converts global ranks to ranks of the saving group.

    Raises:
        CheckpointError: it is sparse, quantised, on the meta device, a partial sum, or of an unsupported dtype.
    """
    local = local_tensor(tensor)
    _check(key, tensor, local)
    dtensor = as_dtensor(tensor)
    shape = tuple(tensor.shape)
    name = dtype_name(tensor.dtype)
    if dtensor is None:
        return Holding(local, name, shape, whole(shape), None)
    layout = dtensor_layout(key, dtensor)
    ranks = () if layout is None else tuple(sorted(group_rank(rank) for rank in _replicas(dtensor)))
    return Holding(local, name, shape, layout or tuple(() for _ in shape), ranks)


def dtensor_layout(key: str, dtensor: Any) -> Layout | None:
    """Returns the layout of this rank's shard of ``dtensor``; None if the rank is not in the mesh.

    Raises:
        CheckpointError: the local shape does not match the placements, or a placement is a partial sum.
    """
    place = dtensor.device_mesh.get_coordinate()
    if place is None:
        return None
    splits = []
    for axis, placement in enumerate(dtensor.placements):
        if placement.is_replicate():
            continue
        dim = getattr(placement, "dim", None)
        if dim is None:
            raise CheckpointError(f"{key} is a DTensor with placement {placement}; redistribute it to a sum first")
        split_factor = int(getattr(placement, "split_factor", 1))
        count = dtensor.device_mesh.size(axis)
        splits.append(Split(dim % dtensor.ndim, count, place[axis], split_factor))
    have = tuple(shard_of(dtensor).shape)
    for arrange in (layout_of, layout_left_to_right):
        candidate = arrange(dtensor.shape, splits)
        if local_shape(candidate) == have:
            return candidate
    raise CheckpointError(
        f"{key} is a DTensor of shape {tuple(dtensor.shape)} placed {tuple(dtensor.placements)} on a mesh of "
        f"{tuple(dtensor.device_mesh.shape)}: this rank should hold {local_shape(candidate)} but has {have}"
    )


def put_together(dtensor: Any) -> torch.Tensor:
    """All-gathers the full tensor of a DTensor.

    Collective: every rank of the group must call this. Floating-point dtypes of one byte are sent as uint8, which every
    backend supports.
    """
    dtype: torch.dtype = dtensor.dtype
    if dtype.itemsize > 1 or not dtype.is_floating_point:
        whole: torch.Tensor = dtensor.full_tensor()
        return whole
    raw: torch.Tensor = distributed_like(shard_of(dtensor).view(torch.uint8), dtensor).full_tensor()
    return raw.view(dtype)


def distributed_like(local: torch.Tensor, dtensor: Any) -> Any:
    """Builds a DTensor with the shape and placements of ``dtensor`` and the local tensor ``local``."""
    from torch.distributed.tensor import DTensor

    mesh, stride = dtensor.device_mesh, row_major(dtensor.shape)
    return DTensor.from_local(local, mesh, dtensor.placements, run_check=False, shape=dtensor.shape, stride=stride)


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Returns the strides of a contiguous tensor, in elements."""
    return tuple(prod(max(size, 1) for size in shape[dim + 1 :]) for dim in range(len(shape)))


def byte_view(tensor: torch.Tensor) -> memoryview:
    """Returns the memory of a contiguous CPU tensor, writable, without a copy; the view keeps the tensor alive.

    numpy could do the same, but not for every dtype, and some installations of torch have no numpy.
    """
    size = tensor.numel() * tensor.element_size()
    if not size:
        return memoryview(bytearray())
    array = _MEMORY.from_address(tensor.data_ptr())
    array.owner = tensor  # type: ignore[attr-defined]
    return memoryview(array).cast("B")[:size]


def own_memory(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
    """Returns the local memory of ``tensor`` if a saved tensor of ``dtype`` can be read into it, otherwise None.

    That is contiguous CPU memory of the same dtype that is not the output of an autograd function.
    """
    if tensor.dtype != dtype or tensor.device.type == "meta" or tensor.grad_fn is not None:
        return None
    local = local_tensor(tensor)
    if type(local) is not torch.Tensor or local.device.type != "cpu" or local.layout != torch.strided:
        return None
    return local if local.is_contiguous() and not local.is_neg() and not local.is_conj() else None


def apart(memories: Sequence[torch.Tensor | None]) -> "list[torch.Tensor | None]":
    """Replaces those of the contiguous ``memories`` that overlap another one by None."""
    spans = sorted(
        (memory.data_ptr(), memory.data_ptr() + memory.nbytes, number)
        for number, memory in enumerate(memories)
        if memory is not None and memory.nbytes
    )
    shared: set[int] = set()
    end, last = 0, -1
    for begin, stop, number in spans:
        if begin < end:
            shared |= {number, last}
        if stop > end:
            end, last = stop, number
    return [None if number in shared else memory for number, memory in enumerate(memories)]


def host_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Returns ``tensor`` itself if it is a contiguous CPU tensor, otherwise a contiguous copy on the CPU."""
    return tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()


def check_memory(key: str, tensor: torch.Tensor) -> None:
    """Refuses a tensor whose bytes are nowhere to be read.

    Raises:
        CheckpointError: it has elements and no memory; ``key`` is its name in the message.
    """
    if tensor.numel() and not tensor.data_ptr():
        kind = type(tensor)
        raise CheckpointError(
            f"{key} is a {kind.__module__}.{kind.__qualname__} without memory of its own (its storage was freed, or it "
            "consists of other tensors); save it before that, or the tensors inside it"
        )


def _replicas(dtensor: Any) -> list[int]:
    """Returns the global ranks with replicas of this rank's shard: other coordinates on replicated mesh axes only."""
    mesh, place = dtensor.device_mesh, dtensor.device_mesh.get_coordinate()
    index = tuple(
        slice(None) if placement.is_replicate() else place[axis] for axis, placement in enumerate(dtensor.placements)
    )
    return [int(rank) for rank in mesh.mesh[index].reshape(-1).tolist()]


def _check(key: str, tensor: torch.Tensor, local: torch.Tensor) -> None:
    kind = type(local)
    if local.device.type == "meta":
        raise CheckpointError(f"{key} is on the meta device and has no values to save; materialise it first")
    if local.is_nested:
        raise CheckpointError(f"{key} is a nested tensor; save its parts (.unbind()) or .to_padded_tensor()")
    if local.layout != torch.strided:
        raise CheckpointError(f"{key} has layout {local.layout}; a checkpoint holds dense tensors (use .to_dense())")
    if is_composite(local):
        raise CheckpointError(
            f"{key} is a {kind.__module__}.{kind.__qualname__}, a tensor made of others; save the tensors inside it. "
            "Nearest, if it is the state of an optimizer: one whose states are plain tensors, such as torch.optim.AdamW"
        )
    check_memory(key, local)
    if dtype_of(dtype_name(tensor.dtype)) is None:
        raise CheckpointError(f"{key} has dtype {tensor.dtype}; known: {', '.join((*CODES, *RAW))}")

"""A tensor's bytes and place: dtypes on disk, memory without copies, DTensors without importing them."""

import ctypes
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from accel_ckpt.format.shard_layout import Layout, Split, layout_left_to_right, layout_of, local_shape, whole
from accel_state.errors import CheckpointError

# Names of dtypes in safetensors headers (its specification); others are stored as bytes, see container.py.
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
RAW = ("complex32", "complex64", "complex128", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu")


@dataclass(frozen=True, slots=True)
class Holding:
    """What one rank holds of a tensor: the memory, where it belongs, and the ranks that hold exactly the same."""

    local: torch.Tensor
    dtype: str
    shape: tuple[int, ...]
    layout: Layout
    ranks: tuple[int, ...] | None
    """None: every rank that knows the name holds all of it (a plain tensor)."""

    @property
    def nbytes(self) -> int:
        elements = self.local.numel() if self.ranks is None else prod(local_shape(self.layout))
        return elements * self.local.element_size()


def dtype_name(dtype: torch.dtype) -> str:
    """``float32`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype | None:
    """The dtype called ``name``; None if it is none that checkpoints hold."""
    return getattr(torch, name, None) if name in CODES or name in RAW else None


def as_dtensor(tensor: torch.Tensor) -> Any:
    """``tensor`` if it is a DTensor, else None. DTensor is not imported for it: who has one has imported it."""
    module = sys.modules.get("torch.distributed.tensor")
    return tensor if module is not None and isinstance(tensor, module.DTensor) else None


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of this rank behind ``tensor``, detached."""
    dtensor = as_dtensor(tensor)
    if dtensor is None:
        return tensor.detach()
    local: torch.Tensor = dtensor._local_tensor.detach()
    return local.wait() if hasattr(local, "wait") else local


def placement_key(tensor: torch.Tensor) -> object:
    """Equal for tensors that are distributed alike."""
    dtensor = as_dtensor(tensor)
    return None if dtensor is None else (dtensor.device_mesh, tuple(dtensor.placements))


def memory_key(tensor: torch.Tensor) -> object:
    """Equal for tensors of the same memory; None for what has no address."""
    local = local_tensor(tensor)
    return None if local.device.type == "meta" else (str(local.device), local.data_ptr())


def hold(key: str, tensor: torch.Tensor, group_rank: Callable[[int], int]) -> Holding:
    """What this rank holds of ``tensor``; ``group_rank`` turns a global rank into one of the saving group.

    Raises:
        CheckpointError: it is sparse, quantised, on the meta device, a partial sum, or of a dtype without a name here.
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
    """Which part of ``dtensor`` this rank holds; None when it is outside of the mesh.

    Raises:
        CheckpointError: the memory is not what the placements say, or holds a partial sum.
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
    have = tuple(dtensor._local_tensor.shape)
    for arrange in (layout_of, layout_left_to_right):
        candidate = arrange(dtensor.shape, splits)
        if local_shape(candidate) == have:
            return candidate
    raise CheckpointError(
        f"{key} is a DTensor of shape {tuple(dtensor.shape)} placed {tuple(dtensor.placements)} on a mesh of "
        f"{tuple(dtensor.device_mesh.shape)}: this rank should hold {local_shape(candidate)} but has {have}"
    )


def put_together(dtensor: Any) -> torch.Tensor:
    """All of a DTensor, on every rank. Collective.

    Floats of one byte travel as plain bytes, which every backend of a group knows.
    """
    dtype: torch.dtype = dtensor.dtype
    if dtype.itemsize > 1 or not dtype.is_floating_point:
        whole: torch.Tensor = dtensor.full_tensor()
        return whole
    raw: torch.Tensor = distributed_like(dtensor._local_tensor.view(torch.uint8), dtensor).full_tensor()
    return raw.view(dtype)


def distributed_like(local: torch.Tensor, dtensor: Any) -> Any:
    """A DTensor of the shape and placements of another, of which ``local`` is this rank's part."""
    from torch.distributed.tensor import DTensor

    mesh, stride = dtensor.device_mesh, row_major(dtensor.shape)
    return DTensor.from_local(local, mesh, dtensor.placements, run_check=False, shape=dtensor.shape, stride=stride)


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a contiguous tensor, in elements."""
    return tuple(prod(max(size, 1) for size in shape[dim + 1 :]) for dim in range(len(shape)))


def byte_view(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor, writable, without a copy; it keeps the tensor alive.

    numpy would do this too, but not for every dtype, and not every installation of torch has it.
    """
    size = tensor.numel() * tensor.element_size()
    if not size:
        return memoryview(bytearray())
    array = (ctypes.c_ubyte * size).from_address(tensor.data_ptr())
    array.owner = tensor  # type: ignore[attr-defined]
    return memoryview(array).cast("B")


def own_memory(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
    """This rank's memory behind ``tensor``, if the bytes of a saved tensor of ``dtype`` can be read straight into it.

    That is memory of the CPU, in order, and of no value that an autograd graph computed.
    """
    if tensor.dtype != dtype or tensor.device.type == "meta" or tensor.grad_fn is not None:
        return None
    local = local_tensor(tensor)
    if type(local) is not torch.Tensor or local.device.type != "cpu" or local.layout != torch.strided:
        return None
    return local if local.is_contiguous() and not local.is_neg() and not local.is_conj() else None


def apart(memories: Sequence[torch.Tensor | None]) -> "list[torch.Tensor | None]":
    """``memories`` without those that overlap with another; all are contiguous."""
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
    """``tensor`` itself if its bytes lie in CPU memory in order, else a copy of which that is true."""
    return tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()


def _replicas(dtensor: Any) -> list[int]:
    """Global ranks that hold the same part as this one: they differ from it only along replicated mesh axes."""
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
    if hasattr(kind, "__tensor_flatten__"):
        raise CheckpointError(
            f"{key} is a {kind.__module__}.{kind.__qualname__}, a tensor made of others; save the tensors inside it"
        )
    if dtype_of(dtype_name(tensor.dtype)) is None:
        raise CheckpointError(f"{key} has dtype {tensor.dtype}; known: {', '.join((*CODES, *RAW))}")

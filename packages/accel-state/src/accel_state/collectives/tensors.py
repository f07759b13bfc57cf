"""Collectives over nested tensors, bucketed into as few collectives as devices and dtypes allow.

Tensors of 1 MiB and more are sent separately from the bucket of the smaller ones, because copying them into the bucket
would cost more than it saves. Every function is a collective: all ranks of the group call it with the same structure,
shapes and dtypes (pad first if shapes differ). Without a group, or in a group of one rank, each function returns its
argument.

Only ``verify`` detects different shapes. Without it the result depends on the backend: gloo, for example, aborts the
process with the shorter buffer.

Sparse and nested tensors, and DTensors of several ranks, are refused by a ``CollectiveError`` that says what to pass.

A tensor on an XLA device is a global array over all machines (SPMD): it is gathered and reduced as if there were one
process.
"""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from accel_state.collectives.group_argument import resolve
from accel_state.collectives.objects import agree as agree
from accel_state.collectives.objects import all_gather_object as all_gather_object
from accel_state.collectives.objects import broadcast_object_list as broadcast_object_list
from accel_state.collectives.objects import check_rank
from accel_state.collectives.objects import gather_object as gather_object
from accel_state.collectives.padding import CannotPadNestedTensorWarning as CannotPadNestedTensorWarning
from accel_state.collectives.padding import pad_across_processes as pad_across_processes
from accel_state.collectives.padding import pad_input_tensors as pad_input_tensors
from accel_state.collectives.verify import is_verified, verify_collective
from accel_state.device.device import is_full
from accel_state.errors import CollectiveError, did_you_mean
from accel_state.pytree.bucket import (
    as_bytes,
    by_dtype,
    gathered_shape,
    in_batches,
    in_packed_order,
    join,
    pack,
    split,
    unpack,
    unpack_rows,
)
from accel_state.pytree.operations import refill, tensor_leaves
from accel_state.watchdog.decorator import outline, recorded

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Work

_REDUCTIONS = ("mean", "sum", "max", "min")
_GLOO = "cpu:gloo"
# gloo's all-gather is a ring, but its all-to-all sends directly to every rank. For small buffers the all-to-all is
# faster: 1.4 times on 2 ranks, 2 to 3 times on 4 (1 to 64 KiB per rank).
_EXCHANGED_BYTES = 1 << 19


@recorded("gather", lambda tensor, **_: outline(tensor))
def gather(tensor: Any, *, group: "ProcessGroup | None" = None, verify: bool | None = None) -> Any:
    """All-gathers every leaf and concatenates along dim 0, on every rank: ``[n, ...]`` becomes ``[W * n, ...]``.

    Collective: every rank of the group must call this. A scalar leaf becomes ``[W]``. Results carry no gradient. One
    collective moves all leaves of a device.

    Raises:
        TypeError: a leaf is not a tensor.
        CollectiveMismatchError: structures, shapes or dtypes differ between ranks (detected only with ``verify``).
    """
    group = resolve(group)
    if group is None:
        return tensor
    if is_verified(verify):
        verify_collective("gather", tensor, group)
    leaves, world = tensor_leaves(tensor, "gather"), group
    if not leaves:
        return tensor
    with torch.no_grad():
        gathered = in_batches(leaves, lambda some: _start_gather(some, world))
    return refill(tensor, iter(gathered))


def _start_gather(leaves: list[torch.Tensor], group: "ProcessGroup") -> Callable[[], list[torch.Tensor]]:
    if is_full(leaves[0]):
        return lambda: leaves
    world_size = group.size()
    if len(leaves) == 1:
        flat = as_bytes(join(leaves))
        result = leaves[0].new_empty(gathered_shape(leaves[0].shape, world_size))
        wait = start_all_gather(as_bytes(result.view(-1)), flat, group)

        def finish_one() -> list[torch.Tensor]:
            wait()
            return [result]

        return finish_one
    packed = pack(leaves)
    rows = packed.buffer.new_empty(world_size, packed.buffer.numel())
    wait = start_all_gather(rows.view(-1), packed.buffer, group)

    def finish() -> list[torch.Tensor]:
        wait()
        return unpack_rows(rows, packed)

    return finish


def start_all_gather(output: torch.Tensor, flat: torch.Tensor, group: "ProcessGroup") -> Callable[[], object]:
    """Starts an all-gather of 1-d bytes into ``output`` (``W`` times as long); returns a function that waits for it."""
    import torch.distributed as dist

    if flat.numel() == 0:
        return _nothing
    if output.numel() <= _EXCHANGED_BYTES and flat.device.type == "cpu" and _GLOO in dist.get_backend_config(group):
        copies = torch.cat([flat] * group.size())
        return _wait_of(dist.all_to_all_single(output, copies, group=group, async_op=True))
    run = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in torch 2.13
    return _wait_of(run(output, flat, group=group, async_op=True))


def _wait_of(work: "Work | None") -> Callable[[], object]:
    return _nothing if work is None else work.wait


def _nothing() -> None:
    """Waits for nothing: stands for the wait when no operation was started."""


@recorded("broadcast", lambda tensor, from_process=0, **_: f"{outline(tensor)}, {from_process}")
def broadcast(
    tensor: Any, from_process: int = 0, *, group: "ProcessGroup | None" = None, verify: bool | None = None
) -> Any:
    """Overwrites every leaf of ``tensor`` in place by that of rank ``from_process`` of the group.

    Collective: every rank of the group must call this. Returns ``tensor`` itself. One collective moves all leaves of a
    device. Raises as ``gather`` does.
    """
    group = resolve(group)
    if group is None:
        return tensor
    check_rank(from_process, group)
    if is_verified(verify):
        verify_collective("broadcast", tensor, group, arguments={"from_process": from_process})
    leaves, world = tensor_leaves(tensor, "broadcast"), group
    with torch.no_grad():
        in_batches(leaves, lambda some: _start_broadcast(some, from_process, world))
    return tensor


def _start_broadcast(
    leaves: list[torch.Tensor], source: int, group: "ProcessGroup"
) -> Callable[[], list[torch.Tensor]]:
    import torch.distributed as dist

    # On SPMD devices, processes may have filled their tensors with different values, so the host copy is broadcast.
    packed = pack([leaf.cpu() for leaf in leaves] if is_full(leaves[0]) else leaves)
    wait: Callable[[], object] = _nothing
    if packed.buffer.numel():
        wait = _wait_of(dist.broadcast(packed.buffer, group=group, group_src=source, async_op=True))

    def finish() -> list[torch.Tensor]:
        wait()
        if group.rank() != source:
            for leaf, received in zip(leaves, unpack(packed), strict=True):
                # A single contiguous leaf is its own buffer.
                if is_full(leaf) or received.data_ptr() != leaf.data_ptr():
                    leaf.copy_(received)
        return leaves

    return finish


@recorded("reduce", lambda tensor, reduction="mean", scale=1.0, **_: f"{outline(tensor)}, {reduction}")
def reduce(
    tensor: Any,
    reduction: str = "mean",
    scale: float = 1.0,
    *,
    group: "ProcessGroup | None" = None,
    verify: bool | None = None,
) -> Any:
    """Reduces every leaf over the ranks ("mean", "sum", "max", "min") and multiplies it by ``scale``.

    Collective: every rank of the group must call this. The input is not changed. One collective per device and dtype.
    Integers and booleans become floating point in a mean or with a scale; the sum of booleans counts them (int64); all
    other results keep their dtype. nan on one rank is nan on all.

    Raises:
        ValueError: an unknown reduction, or the maximum or minimum of complex numbers.
        TypeError: a leaf is not a tensor.
        CollectiveMismatchError: structures, shapes or dtypes differ between ranks (detected only with ``verify``).
    """
    if reduction not in _REDUCTIONS:
        hint = did_you_mean(str(reduction), _REDUCTIONS)
        raise ValueError(f"reduction={reduction!r} is not one of {', '.join(_REDUCTIONS)}{hint}")
    group = resolve(group)
    if group is not None and is_verified(verify):
        verify_collective("reduce", tensor, group, arguments={"reduction": reduction, "scale": scale})
    leaves = tensor_leaves(tensor, "reduce")
    if reduction in ("max", "min") and any([leaf.is_complex() for leaf in leaves]):
        raise ValueError(f"complex numbers have no order, hence no {reduction}; reduce their abs() or their parts")
    with torch.no_grad():
        reduced = in_batches(leaves, lambda some: _start_reduce(some, reduction, scale, group))
    return refill(tensor, iter(reduced))


def _start_reduce(
    leaves: list[torch.Tensor], reduction: str, scale: float, group: "ProcessGroup | None"
) -> Callable[[], list[torch.Tensor]]:
    import torch.distributed as dist

    op = {"max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}.get(reduction, dist.ReduceOp.SUM)
    if is_full(leaves[0]):
        group = None
    running = []
    for dtype, by_shape in by_dtype(leaves).items():
        indices = in_packed_order(by_shape)
        same = [leaves[index] for index in indices]
        flat = join(same).to(wire_dtype(dtype, reduction), copy=len(same) == 1)
        wait: Callable[[], object] = _nothing
        if group is not None and flat.numel():
            if op != dist.ReduceOp.SUM and flat.is_floating_point():
                flat = in_order(flat, nan_last=reduction == "max")
            wait = _wait_of(dist.all_reduce(flat, op, group=group, async_op=True))
        running.append((dtype, indices, same, flat, wait))

    def finish() -> list[torch.Tensor]:
        results: dict[int, torch.Tensor] = {}
        for dtype, indices, same, flat, wait in running:
            wait()
            if dtype.is_floating_point and not flat.is_floating_point():
                flat = from_order(flat)
            whole = _finish(flat, dtype, reduction, scale, 1 if group is None else group.size())
            results.update(zip(indices, split(whole, same), strict=True))
        return [results[index] for index in range(len(leaves))]

    return finish


@recorded("copy_tensor_to_devices")
def copy_tensor_to_devices(
    tensor: torch.Tensor | None = None, *, group: "ProcessGroup | None" = None
) -> torch.Tensor | None:
    """Broadcasts the tensor of the only rank that passes one (other ranks pass None), onto the same type of device.

    Collective: every rank of the group must call this. Without a group, returns ``tensor`` itself. Shape and dtype are
    exchanged first, so that the other ranks need not know them.

    Raises:
        CollectiveError: no rank passed a tensor, or several ranks did.
    """
    group = resolve(group)
    if group is None:
        return tensor
    mine = None if tensor is None else (tuple(tensor.shape), tensor.dtype, tensor.device.type)
    told = all_gather_object(mine, group=group, verify=False)
    sources = [rank for rank, one in enumerate(told) if one is not None]
    if len(sources) != 1:
        who = f"processes {sources} did" if sources else "none did"
        raise CollectiveError(f"copy_tensor_to_devices needs a tensor from exactly one process, but {who}")
    if tensor is None:
        shape, dtype, device = told[sources[0]]
        result = torch.empty(shape, dtype=dtype, device=device)
    else:
        result = tensor.detach().clone()
    broadcast(result, sources[0], group=group, verify=False)
    return result


def wire_dtype(dtype: torch.dtype, reduction: str) -> torch.dtype:
    """Returns the dtype in which ``dtype`` is reduced: supported by all backends, and without overflow in a mean."""
    if dtype == torch.bool:
        return torch.uint8 if reduction in ("max", "min") else torch.int64
    if dtype.is_complex:
        return dtype
    if dtype.is_floating_point:
        return torch.float32 if dtype.itemsize == 1 or (dtype == torch.float16 and reduction == "mean") else dtype
    if reduction == "mean":
        return torch.int64
    return {torch.int16: torch.int32, torch.uint16: torch.int32, torch.uint32: torch.int64}.get(dtype, dtype)


def in_order(numbers: torch.Tensor, *, nan_last: bool) -> torch.Tensor:
    """Returns integers in the order of floating-point numbers; nan is beyond inf, or below -inf.

    The maximum of nan and a number is either of them, depending on the backend and the order of the ranks. That of
    integers is unique, so nan on one rank becomes nan on every rank, as with torch's own ``max`` and ``min``.
    """
    wide = numbers.to(torch.promote_types(numbers.dtype, torch.float32))
    wide = wide.masked_fill(wide.isnan(), math.nan if nan_last else -math.nan)
    return _mirrored(wide.view(torch.int64 if wide.dtype.itemsize == 8 else torch.int32))


def from_order(integers: torch.Tensor) -> torch.Tensor:
    """Returns the numbers, in fp32 or fp64, of which ``in_order`` made ``integers``."""
    return _mirrored(integers).view(torch.float64 if integers.dtype == torch.int64 else torch.float32)


def _mirrored(bits: torch.Tensor) -> torch.Tensor:
    """Turns the order of negative numbers around, whose bits are a sign and a size; its own inverse."""
    return torch.where(bits < 0, bits ^ torch.iinfo(bits.dtype).max, bits)


def _finish(flat: torch.Tensor, dtype: torch.dtype, reduction: str, scale: float, world_size: int) -> torch.Tensor:
    """Divides the reduced buffer (for a mean), scales it, and casts it to the dtype of the result."""
    exact = not (dtype.is_floating_point or dtype.is_complex)
    if reduction == "mean":
        flat = flat / world_size if exact else flat.div_(world_size)
    if scale != 1.0:
        flat = flat * scale
    counted = dtype == torch.bool and reduction == "sum"
    return flat if exact and (counted or flat.is_floating_point()) else flat.to(dtype)

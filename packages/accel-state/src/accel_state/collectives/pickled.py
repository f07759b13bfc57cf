"""Collectives over pickled objects as uint8 tensors, without numpy, which torch's own object collectives need.

A rank whose object cannot be pickled sends the reason in its place, so that every rank raises and none waits.
"""

import ctypes
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

import torch

from accel_state.collectives.group_argument import is_fake
from accel_state.errors import CollectiveError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_PREFIX = 8
# Bytes of each object that are sent in the message of its length: most objects are a status or a name.
_INLINE = 504
# Views memory without a copy, and of any size, whereas ``ctypes.string_at`` takes the size as a C int.
_view_of = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)(
    ("PyMemoryView_FromMemory", ctypes.pythonapi)
)
_READ_ONLY = 0x100  # PyBUF_READ


@final
@dataclass(frozen=True, slots=True)
class _Unpickled:
    """Stands for an object that its rank could not pickle."""

    reason: str


def gather_pickled(obj: Any, group: "ProcessGroup") -> list[Any]:
    """All-gathers ``obj``, in order of rank: one collective, or two if the largest object does not fit inline.

    Collective: every rank of the group must call this.

    Raises:
        CollectiveError: another rank's object cannot be pickled; the error of pickle on that rank.
    """
    (own, error), device = _pickled(obj), _device_of(group)
    first = torch.zeros(_PREFIX + _INLINE, dtype=torch.uint8, device="cpu")
    first[:_PREFIX].view(torch.int64).fill_(own.numel())
    inline = first[_PREFIX:]
    inline[: own.numel()] = own[:_INLINE]
    every = _gathered(first.to(device), group)
    lengths: list[int] = every[:, :_PREFIX].contiguous().view(torch.int64).view(-1).tolist()
    rows = every[:, _PREFIX:]
    if max(lengths) > _INLINE:
        rest = torch.nn.functional.pad(own[_INLINE:], (0, max(lengths) - max(own.numel(), _INLINE)))
        rows = torch.cat([rows, _gathered(rest.to(device), group)], dim=1)
    return _checked([_as_object(row, length) for row, length in zip(rows, lengths, strict=True)], error)


def gather_pickled_at_first(obj: Any, group: "ProcessGroup") -> list[Any] | None:
    """Gathers ``obj`` of every rank, in order of rank, on rank 0 of the group; other ranks get None.

    Collective: every rank of the group must call this. An object that cannot be pickled is an error on its rank and on
    rank 0.
    """
    import torch.distributed as dist

    (own, error), device = _pickled(obj), _device_of(group)
    lengths: list[int] = _gathered(torch.tensor([own.numel()], device=device), group).view(-1).tolist()
    padded = torch.nn.functional.pad(own, (0, max(lengths) - own.numel())).to(device)
    rows = [torch.empty_like(padded) for _ in lengths] if group.rank() == 0 else None
    dist.gather(padded, rows, group=group, group_dst=0)
    if rows is None:
        _checked((), error)
        return None
    return _checked([_as_object(row.cpu(), length) for row, length in zip(rows, lengths, strict=True)], error)


def broadcast_pickled(obj: Any, source: int, group: "ProcessGroup") -> Any:
    """Broadcasts ``obj`` of rank ``source`` of the group; ``obj`` of other ranks is ignored, except in a fake group.

    Collective: every rank of the group must call this.

    Raises:
        CollectiveError: the object cannot be pickled; the error of pickle on its own rank.
    """
    import torch.distributed as dist

    error: Exception | None = None
    device, sends = _device_of(group), group.rank() == source or is_fake(group)
    own = torch.empty(0, dtype=torch.uint8, device="cpu")
    if sends:
        own, error = _pickled(obj)
    size = torch.tensor([own.numel()], device=device)
    dist.broadcast(size, group=group, group_src=source)
    data = own.to(device) if sends else torch.empty(int(size), dtype=torch.uint8, device=device)
    dist.broadcast(data, group=group, group_src=source)
    if sends:
        return _checked([obj], error)[0]
    return _received(data, source)


def send_pickled(obj: Any, destination: int, group: "ProcessGroup") -> None:
    """Sends ``obj`` to rank ``destination`` of the group, which must call ``receive_pickled``."""
    import torch.distributed as dist

    (own, error), device = _pickled(obj), _device_of(group)
    dist.send(torch.tensor([own.numel()], device=device), group=group, group_dst=destination)
    dist.send(own.to(device), group=group, group_dst=destination)
    _checked((), error)


def receive_pickled(source: int, group: "ProcessGroup") -> Any:
    """Receives the object that rank ``source`` of the group passes to ``send_pickled``."""
    import torch.distributed as dist

    device = _device_of(group)
    size = torch.empty(1, dtype=torch.int64, device=device)
    dist.recv(size, group=group, group_src=source)
    data = torch.empty(int(size), dtype=torch.uint8, device=device)
    dist.recv(data, group=group, group_src=source)
    return _received(data, source)


def _gathered(row: torch.Tensor, group: "ProcessGroup") -> torch.Tensor:
    """All-gathers ``row`` and returns a matrix on the host, one row per rank."""
    from accel_state.collectives.tensors import start_all_gather

    rows = row.new_empty(group.size() * row.numel())
    start_all_gather(rows, row, group)()
    return rows.cpu().view(group.size(), -1)


def _pickled(obj: Any) -> tuple[torch.Tensor, Exception | None]:
    """The bytes of an object; or those of the reason why it has none, and the error."""
    error: Exception | None = None
    try:
        data = pickle.dumps(obj, pickle.HIGHEST_PROTOCOL)
    except Exception as caught:
        error = caught
        data = pickle.dumps(_Unpickled(f"{type(caught).__name__}: {caught}"), pickle.HIGHEST_PROTOCOL)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8), error


def _received(data: torch.Tensor, source: int) -> Any:
    """The object of rank ``source``; raises if that rank could not pickle it."""
    found = _as_object(data.cpu(), data.numel())
    if isinstance(found, _Unpickled):
        raise CollectiveError(f"rank {source} sends an object that cannot be pickled: {found.reason}")
    return found


def _checked(found: Sequence[Any], error: Exception | None) -> list[Any]:
    """The objects of all ranks; raises this rank's own ``error``, or names the ranks that could not pickle theirs."""
    if error is not None:
        raise error
    if failed := {rank: one.reason for rank, one in enumerate(found) if isinstance(one, _Unpickled)}:
        reasons = "; ".join(f"rank {rank}: {reason}" for rank, reason in failed.items())
        raise CollectiveError(f"objects that cannot be pickled were given to a collective, on {reasons}")
    return list(found)


def _as_object(data: torch.Tensor, length: int) -> Any:
    return pickle.loads(_view_of(data.data_ptr(), length, _READ_ONLY))


def _device_of(group: "ProcessGroup") -> torch.device:
    """Returns the device type for tensors that the group sends: the CPU if the group has a CPU backend."""
    import torch.distributed as dist

    types = [pair.partition(":")[0] for pair in dist.get_backend_config(group).split(",")]
    return torch.device("cpu" if "cpu" in types else types[0])

"""Collectives over pickled objects as uint8 tensors, without numpy, which torch's own object collectives need."""

import ctypes
import pickle
from typing import TYPE_CHECKING, Any

import torch

from accel_state.collectives.group_argument import is_fake

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_PREFIX = 8
# Bytes of each object that are sent in the message of its length: most objects are a status or a name.
_INLINE = 504


def gather_pickled(obj: Any, group: "ProcessGroup") -> list[Any]:
    """All-gathers ``obj``, in order of rank: one collective, or two if the largest object does not fit inline.

    Collective: every rank of the group must call this.
    """
    own, device = _as_tensor(obj), _device_of(group)
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
    return [_as_object(row, length) for row, length in zip(rows, lengths, strict=True)]


def gather_pickled_at_first(obj: Any, group: "ProcessGroup") -> list[Any] | None:
    """Gathers ``obj`` of every rank, in order of rank, on rank 0 of the group; other ranks get None.

    Collective: every rank of the group must call this.
    """
    import torch.distributed as dist

    own, device = _as_tensor(obj), _device_of(group)
    lengths: list[int] = _gathered(torch.tensor([own.numel()], device=device), group).view(-1).tolist()
    padded = torch.nn.functional.pad(own, (0, max(lengths) - own.numel())).to(device)
    rows = [torch.empty_like(padded) for _ in lengths] if group.rank() == 0 else None
    dist.gather(padded, rows, group=group, group_dst=0)
    if rows is None:
        return None
    return [_as_object(row.cpu(), length) for row, length in zip(rows, lengths, strict=True)]


def broadcast_pickled(obj: Any, source: int, group: "ProcessGroup") -> Any:
    """Broadcasts ``obj`` of rank ``source`` of the group; ``obj`` of other ranks is ignored, except in a fake group.

    Collective: every rank of the group must call this.
    """
    import torch.distributed as dist

    device, sends = _device_of(group), group.rank() == source or is_fake(group)
    own = _as_tensor(obj) if sends else torch.empty(0, dtype=torch.uint8, device="cpu")
    size = torch.tensor([own.numel()], device=device)
    dist.broadcast(size, group=group, group_src=source)
    data = own.to(device) if sends else torch.empty(int(size), dtype=torch.uint8, device=device)
    dist.broadcast(data, group=group, group_src=source)
    return obj if sends else _as_object(data.cpu(), data.numel())


def send_pickled(obj: Any, destination: int, group: "ProcessGroup") -> None:
    """Sends ``obj`` to rank ``destination`` of the group, which must call ``receive_pickled``."""
    import torch.distributed as dist

    own, device = _as_tensor(obj), _device_of(group)
    dist.send(torch.tensor([own.numel()], device=device), group=group, group_dst=destination)
    dist.send(own.to(device), group=group, group_dst=destination)


def receive_pickled(source: int, group: "ProcessGroup") -> Any:
    """Receives the object that rank ``source`` of the group passes to ``send_pickled``."""
    import torch.distributed as dist

    device = _device_of(group)
    size = torch.empty(1, dtype=torch.int64, device=device)
    dist.recv(size, group=group, group_src=source)
    data = torch.empty(int(size), dtype=torch.uint8, device=device)
    dist.recv(data, group=group, group_src=source)
    return _as_object(data.cpu(), data.numel())


def _gathered(row: torch.Tensor, group: "ProcessGroup") -> torch.Tensor:
    """All-gathers ``row`` and returns a matrix on the host, one row per rank."""
    from accel_state.collectives.tensors import start_all_gather

    rows = row.new_empty(group.size() * row.numel())
    start_all_gather(rows, row, group)()
    return rows.cpu().view(group.size(), -1)


def _as_tensor(obj: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(obj, pickle.HIGHEST_PROTOCOL)), dtype=torch.uint8)


def _as_object(data: torch.Tensor, length: int) -> Any:
    return pickle.loads(ctypes.string_at(data.data_ptr(), length))


def _device_of(group: "ProcessGroup") -> torch.device:
    """Returns the device type for tensors that the group sends: the CPU if the group has a CPU backend."""
    import torch.distributed as dist

    types = [pair.partition(":")[0] for pair in dist.get_backend_config(group).split(",")]
    return torch.device("cpu" if "cpu" in types else types[0])

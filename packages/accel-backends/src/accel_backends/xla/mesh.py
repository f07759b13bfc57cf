"""Mesh of the XLA devices of all processes, and sharding of tensors over it."""

from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch

from accel_state.errors import BackendError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch_xla.distributed.spmd import Mesh

DATA_AXIS = "data"
"""The only axis of the mesh: shards rows of batches, and parameters if they are sharded."""


def open_mesh(group: "ProcessGroup | None" = None) -> "Mesh":
    """Returns the mesh of all devices, which torch_xla keeps for the process; created on first use.

    The first call turns SPMD mode on, which torch_xla requires before any tensor is on the devices. torch_xla remembers
    the mode in an environment variable, which may be gone. With several hosts the first call is a collective over
    ``group``, the processes of the hosts: devices are ordered by process, and rows of batches therefore too.

    Collective: every rank of the group must call this.

    Raises:
        BackendError: the hosts do not have equally many distinct devices.
    """
    import numpy
    import torch_xla.distributed.spmd as spmd
    import torch_xla.runtime as runtime

    if not runtime.is_spmd():
        runtime.use_spmd()
    mesh = spmd.get_global_mesh()
    if mesh is None:
        order = list(range(runtime.global_runtime_device_count()))
        if runtime.process_count() > 1:
            from accel_state.collectives.tensors import all_gather_object

            order = in_rows(all_gather_object(_devices_here(), group=group), len(order))
        mesh = spmd.Mesh(numpy.array(order), (len(order),), (DATA_AXIS,))
        spmd.set_global_mesh(mesh)
    return mesh


def in_rows(devices: Sequence[Sequence[int]], count: int) -> list[int]:
    """Returns all devices, ordered by host; ``devices``: the device numbers of each host, in any order.

    Raises:
        BackendError: the hosts do not have equally many of ``count`` distinct devices.
    """
    order = list(chain.from_iterable(devices))
    if sorted(order) != list(range(count)) or len({len(own) for own in devices}) != 1:
        raise BackendError(
            f"the machines have the XLA devices {', '.join(map(str, devices))}; expected {count} in all, 0 to "
            f"{count - 1}, equally many on each"
        )
    return order


def _devices_here() -> list[int]:
    """Returns the numbers of this process's devices, in the order in which it splits a batch."""
    import torch_xla

    return [int(name.rpartition(":")[2]) for name in torch_xla._XLAC._xla_get_runtime_devices()]


def shard(tensor: torch.Tensor) -> None:
    """Shards a tensor over the devices along its longest dimension; does nothing with one device."""
    longest = max(range(tensor.dim()), key=lambda dim: tensor.shape[dim], default=None)
    if longest is not None:
        _mark(tensor, longest)


def shard_rows(tensor: torch.Tensor) -> torch.Tensor:
    """Shards the rows of a tensor over the devices; a tensor without dimensions is replicated."""
    if tensor.dim():
        _mark(tensor, 0)
    return tensor


def _mark(tensor: torch.Tensor, dim: int) -> None:
    import torch_xla.distributed.spmd as spmd

    mesh: Any = open_mesh()
    if mesh.size() == 1:
        return
    spec = tuple(DATA_AXIS if at == dim else None for at in range(tensor.dim()))
    spmd.clear_sharding(tensor)
    spmd.mark_sharding(tensor, mesh, spec)

"""The XLA devices of all processes as one row, and which part of a tensor each of them holds."""

from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch

from accel_state.errors import BackendError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch_xla.distributed.spmd import Mesh

DATA_AXIS = "data"
"""The one axis: rows of batches are spread over it, and parameters where they are sharded."""


def open_mesh(group: "ProcessGroup | None" = None) -> "Mesh":
    """The row of all devices, which torch_xla holds for the process; made when it is first read.

    Devices are driven as one from then on. That has to come before anything is put on them. torch_xla remembers it in a
    variable of the environment, which may be gone. Over several machines the first call is collective: ``group`` is
    their processes, in whose order the devices stand, so that rows of batches do as well.

    Raises:
        BackendError: the machines do not have equally many devices, each its own.
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
    """All devices, those of the first machine first; ``devices`` are the numbers of each machine's, in any order.

    Raises:
        BackendError: the machines do not have equally many of ``count`` devices, each its own.
    """
    order = list(chain.from_iterable(devices))
    if sorted(order) != list(range(count)) or len({len(own) for own in devices}) != 1:
        raise BackendError(
            f"the machines have the XLA devices {', '.join(map(str, devices))}; expected {count} in all, 0 to "
            f"{count - 1}, equally many on each"
        )
    return order


def _devices_here() -> list[int]:
    """Numbers of this process's devices, in the order in which it cuts a batch for them."""
    import torch_xla

    return [int(name.rpartition(":")[2]) for name in torch_xla._XLAC._xla_get_runtime_devices()]


def shard(tensor: torch.Tensor) -> None:
    """Spreads a tensor over the devices along its longest dimension; with one device there is nothing to spread."""
    longest = max(range(tensor.dim()), key=lambda dim: tensor.shape[dim], default=None)
    if longest is not None:
        _mark(tensor, longest)


def shard_rows(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with its rows spread over the devices; one without dimensions is whole on each."""
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

"""The XLA devices of this process as one row, and which part of a tensor each of them holds."""

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch_xla.distributed.spmd import Mesh

DATA_AXIS = "data"
"""The one axis: rows of batches are spread over it, and parameters where they are sharded."""


def open_mesh() -> "Mesh":
    """The row of all devices, which torch_xla holds for the process; made when it is first asked for.

    Devices are driven as one from then on. That has to come before anything is put on them. torch_xla remembers it in a
    variable of the environment, which may be gone.
    """
    import numpy
    import torch_xla.distributed.spmd as spmd
    import torch_xla.runtime as runtime

    if not runtime.is_spmd():
        runtime.use_spmd()
    mesh = spmd.get_global_mesh()
    if mesh is None:
        count = runtime.global_runtime_device_count()
        mesh = spmd.Mesh(numpy.arange(count), (count,), (DATA_AXIS,))
        spmd.set_global_mesh(mesh)
    return mesh


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

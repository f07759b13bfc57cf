"""Batches on XLA devices: sharded over all devices, and of one shape, because each new shape is compiled."""

from typing import Any, final

import torch

from accel_data.device.prefetch import Placed
from accel_state.errors import ConfigError, DataError
from accel_state.pytree.operations import ignorant_find_batch_size, map_leaves, send_to_device


@final
class XLADevices:
    """Moves batches to the XLA devices of this process, and ends the step before each batch.

    The rows of a tensor are sharded over torch_xla's global mesh, if a backend has opened one. With several machines,
    each shards its own batch over its own devices, and the batches form one tensor in order of rank, which requires
    numbers of rows that divide evenly. With ``fill``, a batch with fewer rows than the largest one so far is padded by
    repeating its first rows, so that the last batch of an epoch has the shape of the others; the loader's
    ``real_counts`` give the number of rows that are not padding, as for ``even_batches``.

    Raises:
        ConfigError: several machines without ``fill``, whose last batches would have different shapes.
    """

    def __init__(self, device: torch.device, *, fill: bool = True) -> None:
        import torch_xla.runtime as runtime

        self.device, self.fill = device, fill
        self._machines = int(runtime.process_count())
        if self._machines > 1 and not fill:
            raise ConfigError(
                "even_batches=False cannot be had on several machines with XLA devices, which compute as one on "
                "batches of one shape; leave it out"
            )
        self._local = int(runtime.addressable_runtime_device_count())
        self._rows = 0
        self._specs: dict[tuple[int, bool], Any] = {}

    @property
    def rows(self) -> int | None:
        """Rows of a padded batch; None without ``fill``."""
        return self._rows if self.fill else None

    def start(self, batch: Any) -> Placed:
        """Starts the copies to the devices; they overlap the step."""
        if self.fill:
            batch = self._filled(batch)
        return _RecordedShape(send_to_device(map_leaves(self._send, batch), self.device))

    def _filled(self, batch: Any) -> Any:
        rows = ignorant_find_batch_size(batch) or 0
        self._rows = max(self._rows, rows)
        if not 0 < rows < self._rows:
            return batch
        repeated = torch.arange(self._rows) % rows

        def fill(leaf: Any) -> Any:
            alike = isinstance(leaf, torch.Tensor) and leaf.dim() > 0 and leaf.shape[0] == rows
            return leaf[repeated] if alike else leaf

        return map_leaves(fill, batch)

    def _send(self, leaf: Any) -> Any:
        if type(leaf) is not torch.Tensor or leaf.device.type != "cpu" or leaf.dim() == 0:
            return leaf
        own = leaf.shape[0] % self._local == 0
        if not own and self._machines > 1:
            raise DataError(
                f"a batch of {leaf.shape[0]} rows on each machine cannot be cut for its {self._local} devices; nearest "
                f"that can: {max(1, round(leaf.shape[0] / self._local)) * self._local}"
            )
        key = leaf.dim(), own
        if key not in self._specs:
            self._specs[key] = _rows_spread(leaf.dim(), own=own)
        spec = self._specs[key]
        if spec is None:
            return leaf
        import torch_xla.core.xla_model as xla_model

        return xla_model.send_cpu_data_to_device([leaf], self.device, spec)[0]


def _rows_spread(dimensions: int, *, own: bool) -> Any:
    """Returns the sharding of rows over torch_xla's global mesh; None if no backend has opened a mesh.

    ``own``: each machine has rows of its own, equally many for each of its devices.
    """
    import torch_xla.distributed.spmd as spmd

    mesh = spmd.get_global_mesh()
    if mesh is None:
        return None
    return spmd.ShardingSpec(mesh, (mesh.axis_names[0], *[None] * (dimensions - 1)), minibatch=own)


@final
class _RecordedShape:
    """A batch on the devices."""

    def __init__(self, batch: Any) -> None:
        self._batch = batch

    def take(self) -> Any:
        """Ends the step with ``torch_xla.sync``, otherwise steps would be traced into one graph; returns the batch."""
        import torch_xla

        torch_xla.sync()
        return self._batch

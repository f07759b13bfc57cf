"""Batches on XLA devices: cut over all of them, and of one shape, because every other shape is compiled anew."""

from typing import Any, final

import torch

from accel_data.device.prefetch import Placed
from accel_state.errors import ConfigError, DataError
from accel_state.pytree.operations import ignorant_find_batch_size, map_leaves, send_to_device


@final
class XLADevices:
    """Moves batches to the XLA devices of this process, and ends the step before each.

    The rows of a tensor are spread over the devices of torch_xla's global mesh, where a backend has opened one. Over
    several machines each cuts its own batch for its own devices, and all of them are one tensor, in the order of ranks,
    which the numbers of rows must allow. With ``fill``, a batch of fewer rows than the largest before it repeats its
    first ones, so that the last batch of an epoch has the shape of the others; a loader's ``real_counts`` say which
    rows are new, as for any batch made even.

    Raises:
        ConfigError: several machines without ``fill``, whose last batches would not be of one shape.
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

    def start(self, batch: Any) -> Placed:
        """Begins the copies to the devices; they run beside the step."""
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
    """How the rows of a tensor are spread over torch_xla's global mesh; None where no backend has opened one.

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
        """The batch; what was recorded before it runs now, or steps would grow into one computation."""
        import torch_xla

        torch_xla.sync()
        return self._batch

"""Process group of a single process, for libraries that compute over process groups only."""

from typing import TYPE_CHECKING, Any, cast, final

if TYPE_CHECKING:
    from accel_state.device.device import Device


@final
class SingleProcessGroup:
    """The default group of a process that has none, of this process alone; its opener closes it.

    Args:
        device: device of the process, whose collective backend the group has.
    """

    def __init__(self, device: "Device") -> None:
        self._device = device
        self._opened = False

    def open(self) -> None:
        """Opens the group, unless the process has a default group."""
        import torch.distributed as dist

        if not dist.is_initialized():
            store = cast(Any, dist).HashStore()
            dist.init_process_group(self._device.collective_backend, store=store, rank=0, world_size=1)
            self._opened = True

    def close(self) -> None:
        """Destroys the group if this object opened it."""
        import torch.distributed as dist

        opened, self._opened = self._opened, False
        if opened and dist.is_initialized():
            dist.destroy_process_group()

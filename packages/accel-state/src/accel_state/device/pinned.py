"""Pinned host memory, from and to which an accelerator copies at the speed of its link while the host goes on."""

import logging
from typing import TYPE_CHECKING, Any, final

if TYPE_CHECKING:
    import torch

_LOG = logging.getLogger(__name__)


def uses_pinned_memory(device: "torch.device") -> bool:
    """Whether tensors of ``device`` pass through pinned memory: those of the process's accelerator that has streams."""
    import torch

    if device.type in ("cpu", "meta", "mps") or not torch.accelerator.is_available():
        return False
    return device.type == torch.accelerator.current_accelerator().type  # type: ignore[union-attr]


def pinned_bytes(count: int) -> "torch.Tensor":
    """Allocates pinned memory (uint8); pageable memory, with a warning, if the system refuses to pin more."""
    import torch

    if torch.accelerator.is_available():
        try:
            return torch.empty(count, dtype=torch.uint8, pin_memory=True, device="cpu")
        except RuntimeError as error:
            _LOG.warning("%d MiB of pinned memory were refused (%s); copies take longer", count >> 20, error)
    return torch.empty(count, dtype=torch.uint8, device="cpu")


@final
class HostCopy:
    """Copy of a tensor in host memory, begun at once and in the order of the stream that computes the tensor.

    ``read`` waits for that moment alone: a copy that began there would follow all that was issued until then.
    """

    __slots__ = ("_host", "_ready")

    def __init__(self, tensor: "torch.Tensor") -> None:
        import torch

        self._ready: Any = None
        if tensor.device.type == "cpu":
            self._host = tensor.clone()
            return
        self._host = pinned_bytes(tensor.nbytes).view(tensor.dtype).view(tensor.shape)
        self._host.copy_(tensor, non_blocking=True)
        self._ready = torch.accelerator.current_stream(tensor.device).record_event()

    def read(self) -> "torch.Tensor":
        """Returns the copy once it is complete."""
        if self._ready is not None:
            self._ready.synchronize()
        return self._host

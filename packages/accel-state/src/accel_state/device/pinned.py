"""Pinned host memory, from and to which an accelerator copies at the speed of its link while the host goes on."""

import logging
import weakref
from collections.abc import Callable
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


def pin_in_place(tensor: "torch.Tensor") -> "Callable[[], object] | None":
    """Pins the memory that a CPU tensor has. Pinned memory that torch allocates is rounded up to a power of two.

    Takes about 0.07 s for a gigabyte, as allocating pinned memory does. The memory is unpinned when the returned
    function is called, and otherwise before it is freed. Returns None without CUDA or ROCm, and, with a warning, if
    the driver refuses.

    Source: ``cudaHostRegister`` of the CUDA runtime.
    """
    import torch

    if not torch.cuda.is_available():
        return None
    runtime, address = torch.cuda.cudart(), tensor.data_ptr()
    if status := int(runtime.cudaHostRegister(address, tensor.nbytes, 0)):
        _LOG.warning("the driver did not pin %d MiB (CUDA error %d); copies take longer", tensor.nbytes >> 20, status)
        _forget_cuda_error()
        return None
    return weakref.finalize(tensor, runtime.cudaHostUnregister, address)


def _forget_cuda_error() -> None:
    """Launches a kernel, whose check takes the error that the runtime kept of an earlier call."""
    import torch

    try:
        torch.zeros(1, device="cuda")
    except RuntimeError:
        return


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

"""Release of device and host memory, and the search for a batch size that fits."""

import ctypes
import functools
import gc
import inspect
import sys
from collections.abc import Callable
from typing import Any

# Out-of-memory messages of the allocators of CUDA, ROCm, cuBLAS, NCCL, MPS, cuDNN, the CPU and Gaudi.
_OUT_OF_MEMORY = (
    " out of memory.",
    "CUDA error: out of memory",
    "HIP error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "Cuda failure 2 'out of memory'",
    "MPS backend out of memory",
    "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED.",
    "DefaultCPUAllocator: can't allocate memory",
    "FATAL ERROR :: MODULE:PT_DEVMEM Allocation failed",
)


def clear_device_cache(garbage_collection: bool = False) -> None:
    """Empties the caching allocator of every device type in use, after a garbage collection if requested.

    Device types that the process has not used yet have no cache and are not initialised.
    """
    if garbage_collection:
        gc.collect()
    from accel_state.device.kinds import DEVICE_KINDS

    for kind in DEVICE_KINDS.values():
        kind.functions.empty_used_cache(kind)


def release_memory(*objects: object) -> list[None]:
    """Collects garbage, clears device caches and returns as many None as objects: ``a, b = release_memory(a, b)``.

    The caller's own names still refer to the objects until the assignment, so only objects in reference cycles are
    freed here; the memory of the others is returned to the device by the next call.
    """
    count = len(objects)
    del objects
    clear_device_cache(garbage_collection=True)
    return [None] * count


def should_reduce_batch_size(exception: Exception) -> bool:
    """Whether ``exception`` is an out-of-memory error of a device or of the CPU."""
    import torch

    if isinstance(exception, torch.OutOfMemoryError):
        return True
    if not isinstance(exception, RuntimeError) or len(exception.args) != 1:
        return False
    return any(text in str(exception.args[0]) for text in _OUT_OF_MEMORY)


def find_executable_batch_size(
    function: Callable[..., Any] | None = None,
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[[], int] | None = None,
) -> Callable[..., Any]:
    """Calls ``function`` with a batch size as first argument, and with smaller ones while memory runs out.

    The size shrinks by a tenth (128, 115, 103, ...), or to the result of ``reduce_batch_size_fn()``. The next call of
    the same decorated function starts at the last size that worked. Usable as a decorator with and without arguments.
    Each process finds its own size: if all ranks need the same, reduce the sizes to their minimum and call again.

    Raises:
        RuntimeError: no size down to 1 worked, or ``reduce_batch_size_fn`` returned no smaller one.
        TypeError: the caller passed the batch size itself.
    """
    if function is None:
        return functools.partial(
            find_executable_batch_size,
            starting_batch_size=starting_batch_size,
            reduce_batch_size_fn=reduce_batch_size_fn,
        )
    size = starting_batch_size

    @functools.wraps(function)
    def search(*args: Any, **kwargs: Any) -> Any:
        nonlocal size
        _refuse_batch_size(function, args)
        clear_device_cache(garbage_collection=True)
        while size > 0:
            try:
                return function(size, *args, **kwargs)
            except Exception as error:
                if not should_reduce_batch_size(error):
                    raise
            # Outside the handler, because its traceback still refers to the tensors of the failed attempt.
            clear_device_cache(garbage_collection=True)
            failed, size = size, int(size * 0.9) if reduce_batch_size_fn is None else reduce_batch_size_fn()
            if not size < failed:
                given, size = size, starting_batch_size
                raise RuntimeError(
                    f"reduce_batch_size_fn returned {given!r} after memory had run out at {failed}; expected a smaller "
                    "batch size, otherwise the search would not end"
                )
        size = starting_batch_size
        raise RuntimeError("No executable batch size found, reached zero.")

    return search


def _refuse_batch_size(function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters):
        return
    names = [p.name for p in parameters if p.kind in {p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD}]
    if len(args) < len(names):
        return
    given = ", ".join(f"{name}={value}" for name, value in zip(names[1:], args[1:], strict=False))
    raise TypeError(
        f"Batch size was passed into `{function.__name__}` as the first argument when called; it is passed for you. "
        f"Remove it: `{function.__name__}({given})`"
    )


def trim_host_memory() -> None:
    """Returns free blocks of the heap to the operating system, where the C library can (glibc).

    It keeps freed tensors of up to 32 MiB that lie between others, so that many temporary ones beside a few that stay
    take several times the memory of those.
    """
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(ctypes.c_size_t(0))

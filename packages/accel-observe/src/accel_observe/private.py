"""Private names of torch that this package uses, read in torch 2.9 and 2.13, each with what happens without it.

No other module of the package uses a private name of torch; CI checks that.
"""

from collections.abc import Callable, Sequence

import torch


def at_end_of_backward(call: Callable[[], None]) -> None:
    """Calls ``call`` when the backward pass in progress has ended, by ``Variable._execution_engine.queue_callback``.

    Raises:
        RuntimeError: this torch does not have it, or no backward pass is in progress.
    """
    engine = getattr(torch.autograd.Variable, "_execution_engine", None)
    if engine is None:
        raise RuntimeError(
            f"torch {torch.__version__} has no torch.autograd.Variable._execution_engine, by which the time of the "
            "backward is measured; use torch 2.9 to 2.13"
        )
    engine.queue_callback(call)


def norms(tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Returns the 2-norm of each tensor in fp32, in one launch by ``torch._foreach_norm``; one by one without it.

    Sums of halves are in fp32, without fp32 copies of the tensors.
    """
    together = getattr(torch, "_foreach_norm", None)
    if together is None or any(tensor.dtype.itemsize > 4 for tensor in tensors):
        wide = [torch.float32 if tensor.dtype.itemsize < 4 else tensor.dtype for tensor in tensors]
        return [torch.linalg.vector_norm(x, dtype=dtype).float() for x, dtype in zip(tensors, wide, strict=True)]
    found: Sequence[torch.Tensor] = together(tensors, 2, dtype=torch.float32)
    return found

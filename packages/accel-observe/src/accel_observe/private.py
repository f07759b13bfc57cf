"""Private names of torch that this package uses, read in torch 2.9, 2.13 and 2.15, each with what happens without it.

No other module of the package uses a private name of torch; CI checks that.
"""

from collections.abc import Callable

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
            "backward is measured; use torch 2.9 to 2.15"
        )
    engine.queue_callback(call)

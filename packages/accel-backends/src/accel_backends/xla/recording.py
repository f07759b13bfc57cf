"""Recorded computations of XLA devices: running them, and results in host memory."""

from typing import Any

import torch


def run_recorded() -> None:
    """Runs the computations that have been recorded so far."""
    import torch_xla

    torch_xla.sync()


def on_host(state: Any) -> Any:
    """Returns nested tensors in host memory.

    Runs the recorded computations once, instead of a part of them for each copied tensor.
    """
    from accel_state.pytree.operations import map_leaves

    run_recorded()
    return map_leaves(lambda leaf: leaf.detach().cpu() if isinstance(leaf, torch.Tensor) else leaf, state)

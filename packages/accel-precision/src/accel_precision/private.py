"""Private names of torch that this package uses, read in torch 2.9, 2.13 and 2.15, each with what happens without it.

No other module of the package uses a private name of torch; CI checks that.
"""

from typing import Any

import torch


def unscale(gradients: list[torch.Tensor], found: torch.Tensor, inverse: torch.Tensor) -> None:
    """Multiplies the gradients by ``inverse`` in place, and sets ``found`` to 1 if one of them is not finite.

    In one launch, by ``torch._amp_foreach_non_finite_check_and_unscale_``; one by one without it. All of them are of
    one device and dtype.
    """
    together = getattr(torch, "_amp_foreach_non_finite_check_and_unscale_", None)
    if together is not None:
        together(gradients, found, inverse)
        return
    for gradient in gradients:
        found.logical_or_(~gradient.isfinite().all())
        gradient.mul_(inverse)


def shard_of(dtensor: Any) -> Any:
    """Returns this rank's tensor of a DTensor, ``_local_tensor``; None if it is not one."""
    return getattr(dtensor, "_local_tensor", None)

"""Private names of torch that this package uses, read in torch 2.9, 2.13 and 2.15, each with what happens without it.

No other module of the package uses a private name of torch; CI checks that.
"""

from typing import Any

import torch


def shard_of(dtensor: Any) -> torch.Tensor:
    """Returns this rank's tensor of a DTensor, unseen by autograd: ``_local_tensor``, or ``to_local`` without it."""
    local: torch.Tensor | None = getattr(dtensor, "_local_tensor", None)
    if local is None:
        with torch.no_grad():
            local = dtensor.to_local()
    return local

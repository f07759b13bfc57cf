"""Weights that FSDP all-gathers in 8 bits: updates of their scales, and all-gathers of bytes."""

from collections.abc import Iterable, Sequence
from typing import Any, final

import torch
from torch import nn

from accel_precision.fp8 import Follower, FollowingConverter, ModuleConverter


def follow(
    root: nn.Module,
    units: Iterable[Any],
    converter: ModuleConverter | None,
    *,
    collective_backend: str,
    device_type: str,
) -> Follower | None:
    """Returns the converter's follower, which updates the scales of ``root``'s sharded weights; None if there is none.

    A hook on ``root`` calls the follower's ``check`` before each forward; the caller has to call ``renew`` after each
    step. With gloo, ``root`` and ``units`` all-gather with ``ByteGather`` from now on.
    """
    follower = converter.follow(root) if isinstance(converter, FollowingConverter) else None
    if follower is None:
        return None
    check = follower.check
    root.register_forward_pre_hook(lambda module, args: check(), prepend=True)
    if serves(collective_backend, device_type) == "gloo":  # gloo has no 8-bit floats
        gather = ByteGather()
        for unit in (root, *units):
            unit.set_custom_all_gather(gather)
    return follower


def serves(collective_backend: str, device_type: str) -> str:
    """Returns the backend for a device type of a name that may list several, as "cpu:gloo,cuda:nccl"."""
    parts = [part.partition(":") for part in collective_backend.split(",")]
    return next((name or head for head, _, name in parts if not name or head == device_type), "")


@final
class ByteGather:
    """All-gathers tensors as bytes, for dtypes that the collective backend does not support."""

    def allocate(
        self, size: "Sequence[int | torch.SymInt]", *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Allocates the output of the all-gather."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, async_op: bool = False
    ) -> Any:
        """All-gathers ``input_tensor`` of every rank into ``output_tensor``."""
        import torch.distributed as dist

        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name before torch 2.13
        return gather(output_tensor.view(torch.uint8), input_tensor.view(torch.uint8), group=group, async_op=async_op)

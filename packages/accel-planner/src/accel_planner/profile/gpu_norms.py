"""RMS norms as GPUs compute them, in a trace on the CPU, which keeps intermediates that a GPU's one kernel does not."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

_WITH_A_KERNEL = ("cuda", "mps")
"""Device types for which torch computes an RMS norm in one kernel (``at::rms_norm`` of torch 2.13)."""


@contextmanager
def norms_of(device_type: str) -> Iterator[None]:
    """Makes RMS norms of fake CPU tensors keep for backward what they keep on ``device_type``, in this process."""
    if device_type not in _WITH_A_KERNEL or not hasattr(torch.ops.aten, "_fused_rms_norm"):
        yield
        return
    library = torch.library.Library("aten", "IMPL")
    library.impl("rms_norm", _rms_norm, "AutogradCPU")
    try:
        yield
    finally:
        del library  # its kernel with it


def _rms_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    if weight is not None and weight.dtype != input.dtype:  # which torch computes in parts on a GPU, too
        parts: Tensor = torch.ops.aten.rms_norm.default.decompose(input, normalized_shape, weight, eps)
        return parts
    result: Tensor = _FusedNorm.apply(input, weight, len(normalized_shape))  # type: ignore[no-untyped-call]
    return result


class _FusedNorm(torch.autograd.Function):
    """Sizes of an RMS norm over the last ``dims`` dimensions; it computes no values."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, dims: int) -> Tensor:
        """Keeps the input, the weight, and one reciprocal of a root for each norm, in fp32."""
        roots = x.new_empty(x.shape[: x.dim() - dims], dtype=torch.promote_types(x.dtype, torch.float32))
        ctx.save_for_backward(x, weight, roots)
        return torch.empty_like(x, memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of the input and the weight."""
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), None if weight is None else torch.empty_like(weight), None

"""Synchronised batch normalisation for devices on which torch's SyncBatchNorm does not run."""

from typing import Any, final

import torch
import torch.distributed as dist
from torch import nn

from accel_backends.private import BatchNorm

# Device types with kernels of torch.nn.SyncBatchNorm.
_TORCHS_OWN = ("cuda", "xpu", "hpu")


def convert_sync_batch_norm(model: nn.Module, group: Any = None) -> nn.Module:
    """Replaces batch normalisations by ones that compute their statistics over all ranks of ``group``.

    Parameters and buffers stay the same objects. Uses torch's SyncBatchNorm on its device types, and otherwise the
    class below.
    """
    first = next(model.parameters(), None)
    if first is not None and first.device.type in _TORCHS_OWN:
        converted: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(model, group)
        return converted
    return _convert(model, group)


def _convert(module: nn.Module, group: Any) -> nn.Module:
    if isinstance(module, BatchNorm) and not isinstance(module, (SyncBatchNorm, nn.SyncBatchNorm)):
        return SyncBatchNorm(module, group)
    for name, child in module.named_children():
        setattr(module, name, _convert(child, group))
    return module


@final
class SyncBatchNorm(BatchNorm):
    """Batch normalisation with mean and variance over the batches of all ranks.

    Statistics are computed in two passes, mean first, because the difference of large squares loses precision. Ranks
    may have batches of different sizes, empty ones included. In eval mode this is ordinary batch normalisation.
    """

    def __init__(self, other: BatchNorm, group: Any = None) -> None:
        super().__init__(other.num_features, other.eps, other.momentum, other.affine, other.track_running_stats)
        self.weight, self.bias = other.weight, other.bias
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            self._buffers[name] = other._buffers.get(name)
        self.training = other.training
        self._group = group

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2 dimensions (batch, channel, ...), got {input.dim()}")

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalises over every dimension except the second (channels)."""
        if not self.training:
            return super().forward(input)
        self._check_input_dim(input)
        mean, variance, count = self._statistics(input)
        if self.running_mean is not None and self.running_var is not None:
            self._track(mean.detach(), variance.detach(), count)
        shape = (1, -1, *(1,) * (input.dim() - 2))
        wide = (input - mean.view(shape)) * torch.rsqrt(variance + self.eps).view(shape)
        if self.affine:
            wide = wide * self.weight.view(shape) + self.bias.view(shape)
        return wide.to(input.dtype)

    def _statistics(self, input: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns mean and biased variance of each channel over all ranks, and the number of values per channel."""
        dims = [dim for dim in range(input.dim()) if dim != 1]
        wide = input if input.dtype.itemsize >= 4 else input.float()
        here = wide.new_tensor([input.numel() / max(1, input.shape[1])])
        sums = _sum_over_ranks(torch.cat([wide.sum(dims), here]), self._group)
        count = sums[-1].detach()
        if float(count) <= 1:
            raise ValueError(
                f"expected more than 1 value per channel over all ranks when training, got {float(count):g}"
            )
        mean = sums[:-1] / count
        centred = wide - mean.view(1, -1, *(1,) * (input.dim() - 2))
        return mean, _sum_over_ranks((centred * centred).sum(dims), self._group) / count, count

    def _track(self, mean: torch.Tensor, variance: torch.Tensor, count: torch.Tensor) -> None:
        assert self.running_mean is not None
        assert self.running_var is not None
        momentum = self.momentum
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if momentum is None:
                momentum = 1.0 / float(self.num_batches_tracked)
        momentum = 0.0 if momentum is None else momentum
        unbiased = variance * (count / (count - 1))
        self.running_mean.mul_(1 - momentum).add_(mean.to(self.running_mean.dtype), alpha=momentum)
        self.running_var.mul_(1 - momentum).add_(unbiased.to(self.running_var.dtype), alpha=momentum)


class _Sum(torch.autograd.Function):
    """Sum over ranks. Its backward also sums over ranks, because every rank's result depends on this rank's input."""

    @staticmethod
    def forward(context: Any, tensor: torch.Tensor, group: Any) -> torch.Tensor:
        context.group = group
        total = tensor.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        total = gradient.contiguous().clone()
        dist.all_reduce(total, group=context.group)
        return total, None


def _sum_over_ranks(tensor: torch.Tensor, group: Any) -> torch.Tensor:
    result: torch.Tensor = _Sum.apply(tensor, group)  # type: ignore[no-untyped-call]
    return result

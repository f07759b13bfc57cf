"""Replicated parameters of an FSDP model, which torch does not reduce: their gradients are averaged here."""

from collections.abc import Iterable
from functools import reduce
from typing import Any, final

import torch
from torch import nn

from accel_state.watchdog.decorator import recorded


@final
class ReplicatedParameters:
    """Averages gradients of parameters that are not sharded: those without dimension, and those of ignored modules.

    ``average`` reduces all gradients together after a backward of the backend, so that ranks and micro-batches may use
    different parameters. In a direct ``loss.backward()`` each gradient is averaged when it has been accumulated; then
    all ranks have to use the same parameters. Averaging the sum of several unsynchronised backwards gives the average
    of all of them, and averaging an average does not change it.

    Attributes:
        synchronising: whether backward reduces gradients.
        deferred: a backward of the backend is running, after which ``average`` is called.
    """

    __slots__ = ("_group", "_parameters", "_ranks", "deferred", "synchronising")

    def __init__(self, parameters: Iterable[nn.Parameter], group: Any, ranks: int) -> None:
        self._parameters = list(parameters) if ranks > 1 else []
        self._group, self._ranks = group, ranks
        self.synchronising = True
        self.deferred = False
        for parameter in self._parameters:
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._average_one)

    def __bool__(self) -> bool:
        return bool(self._parameters)

    @recorded("average gradients", shared=False)
    @torch.no_grad()
    def average(self) -> None:
        """Averages all gradients in one all-reduce; a parameter that no rank used keeps ``grad`` None.

        Collective: every rank of the group must call this.
        """
        import torch.distributed as dist

        trained = [parameter for parameter in self._parameters if parameter.requires_grad]
        if not trained:
            return
        dtype = reduce(torch.promote_types, (parameter.dtype for parameter in trained))
        gradients = [parameter.grad for parameter in trained]
        here = [gradient is not None for gradient in gradients]
        values = [
            parameter.new_zeros(parameter.numel(), dtype=dtype) if gradient is None else gradient.flatten().to(dtype)
            for parameter, gradient in zip(trained, gradients, strict=True)
        ]
        both = torch.cat([*values, values[0].new_tensor(here)])
        dist.all_reduce(both, group=self._group)
        *sums, counts = both.split([*(parameter.numel() for parameter in trained), len(trained)])
        used = here if all(here) else counts.bool().tolist()
        for parameter, total, anywhere in zip(trained, sums, used, strict=True):
            mean = total.div_(self._ranks).view(parameter.shape)
            if parameter.grad is not None:
                parameter.grad.copy_(mean)
            elif anywhere:
                parameter.grad = mean.to(parameter.dtype, copy=True)

    def _average_one(self, parameter: torch.Tensor) -> None:
        import torch.distributed as dist

        if self.synchronising and not self.deferred and parameter.grad is not None:
            dist.all_reduce(parameter.grad, group=self._group)
            parameter.grad.div_(self._ranks)

"""Replicated parameters of an FSDP model, which torch does not reduce: their gradients are averaged here."""

from collections.abc import Iterable
from typing import Any, final

import torch
from torch import nn

from accel_backends.ops.averaging import average_gradients
from accel_state.watchdog.decorator import recorded


@final
class ReplicatedParameters:
    """Averages gradients of parameters that are not sharded: without dimension or elements, or of ignored modules.

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
    def average(self) -> None:
        """Averages all gradients, in one all-reduce per dtype; a parameter that no rank used keeps ``grad`` None.

        Sparse ones become dense, because ranks may have different rows.

        Collective: every rank of the group must call this.
        """
        trained = [parameter for parameter in self._parameters if parameter.requires_grad]
        for parameter in trained:
            if parameter.grad is not None and parameter.grad.is_sparse:
                parameter.grad = parameter.grad.to_dense()
        average_gradients(trained, self._group)

    def _average_one(self, parameter: torch.Tensor) -> None:
        import torch.distributed as dist

        if self.synchronising and not self.deferred and parameter.grad is not None:
            dist.all_reduce(parameter.grad, group=self._group)
            parameter.grad.div_(self._ranks)

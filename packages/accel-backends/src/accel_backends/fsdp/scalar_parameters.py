"""Parameters without dimensions in an FSDP2 model: they are replicated, and their gradients are averaged here."""

from collections.abc import Iterable
from functools import reduce
from typing import Any, final

import torch
from torch import nn

from accel_state.watchdog.decorator import recorded


@final
class ScalarParameters:
    """Averages the gradients of parameters that ``fully_shard`` cannot shard, and therefore does not reduce.

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
        nothing = trained[0].new_zeros((), dtype=dtype)
        gradients = [parameter.grad for parameter in trained]
        here = [gradient is not None for gradient in gradients]
        values = torch.stack([nothing if gradient is None else gradient.to(dtype) for gradient in gradients])
        both = torch.cat([values, values.new_tensor(here)])
        dist.all_reduce(both, group=self._group)
        means, counts = both.view(2, -1)
        used = here if all(here) else counts.bool().tolist()
        for parameter, mean, anywhere in zip(trained, means / self._ranks, used, strict=True):
            if parameter.grad is not None:
                parameter.grad.copy_(mean)
            elif anywhere:
                parameter.grad = mean.to(parameter.dtype, copy=True)

    def _average_one(self, parameter: torch.Tensor) -> None:
        import torch.distributed as dist

        if self.synchronising and not self.deferred and parameter.grad is not None:
            dist.all_reduce(parameter.grad, group=self._group)
            parameter.grad.div_(self._ranks)

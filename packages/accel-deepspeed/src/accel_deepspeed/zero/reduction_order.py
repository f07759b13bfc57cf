"""Reduction of gradients in the same order on all ranks, with zeros for missing gradients."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import torch
from torch import nn

from accel_backends.private import accumulation_hooks
from accel_deepspeed.zero.missing_gradients import Presence
from accel_state.errors import BackendError
from accel_state.watchdog.decorator import recorded


@final
class ReductionOrder:
    """Passes gradients to an engine of stage 2 or 3 in the same order on every rank.

    DeepSpeed reduces gradients in buckets, in the order in which backward computes them. A rank that skips a block
    would reduce other parameters in the same bucket than other ranks, and parameters that all ranks leave out would
    keep values of an earlier accumulation window. Here a gradient is reduced after all gradients before it in one fixed
    order, and at the end of a backward missing gradients are replaced by zeros. The order is that of rank 0's first
    backward, so that gradients of later backwards rarely wait.

    Args:
        optimizer: DeepSpeed's optimizer; two of its methods are replaced until ``remove``.
        reduce: name of the method that takes one gradient.
        gradients: arguments of that method for each parameter, the parameter first.
        names: FQNs of the parameters, by id.
        presence: records which parameters have received gradients.
    """

    def __init__(
        self,
        optimizer: Any,
        reduce: str,
        gradients: Sequence[tuple[Any, ...]],
        *,
        names: Mapping[int, str],
        presence: Presence,
    ) -> None:
        self._optimizer, self._name = optimizer, reduce
        self._reduce: Callable[..., None] = getattr(optimizer, reduce)
        self._finish: Callable[[], None] = optimizer.overlapping_partition_gradients_reduce_epilogue
        self._calls = [call for call in reversed(gradients) if call[0].requires_grad]
        self._names, self._hooks = names, {id(call[0]): _hooks_of(call[0]) for call in self._calls}
        self._received = presence.received
        self._first: list[int] | None = []
        self._arrange()
        setattr(optimizer, reduce, self._arrived)
        optimizer.overlapping_partition_gradients_reduce_epilogue = self._complete

    def check(self) -> None:
        """Refuses a step that would ignore changes of gradients since the last backward.

        Raises:
            BackendError: gradients of a direct ``loss.backward()``, assigned to parameters, or changed by late hooks.
        """
        if self._next or any(self._here):
            raise BackendError(
                "gradients came from a backward that the engine did not run, and DeepSpeed's step would not take "
                "them; call the prepared model, and accelerator.backward(loss)"
            )
        for parameter, *_ in self._calls:
            if parameter.grad is not None:
                raise BackendError(
                    f"{self._names[id(parameter)]}.grad was set after backward; ZeRO stages 2 and 3 have spread the "
                    "gradients over ranks by then, and step with those; scale the loss instead, or use zero_stage=1"
                )
            known = self._hooks[id(parameter)]
            if len(accumulation_hooks(parameter)) > known and _hooks_of(parameter) > known:
                raise BackendError(
                    f"{self._names[id(parameter)]} got a hook by register_post_accumulate_grad_hook after prepare; "
                    "ZeRO stages 2 and 3 take its gradient before that runs; register it before prepare, or use "
                    "register_hook"
                )

    def forget(self) -> None:
        """Restarts at the first parameter, and drops gradients of a backward that failed."""
        self._next = 0
        self._here = [False] * len(self._calls)

    def remove(self) -> None:
        """Restores the optimizer's own methods."""
        for name in (self._name, "overlapping_partition_gradients_reduce_epilogue"):
            self._optimizer.__dict__.pop(name, None)

    def _arrange(self) -> None:
        self._places = {id(call[0]): place for place, call in enumerate(self._calls)}
        self.forget()

    def _arrived(self, parameter: nn.Parameter, *group: int) -> None:
        if not getattr(parameter, "ds_grad_is_ready", True):
            return  # a partial gradient of a tiled computation
        place = self._places[id(parameter)]
        self._received.add(id(parameter))
        if self._first is not None:
            self._first.append(place)
        if place < self._next:  # a second gradient in this backward, of a checkpointed block that is used twice
            self._reduce(parameter, *group)
            return
        self._here[place] = True
        while self._next < len(self._here) and self._here[self._next]:
            self._reduce(*self._calls[self._next])
            self._next += 1

    @recorded("reduce gradients", lambda order: "")
    def _complete(self) -> None:
        for place in range(self._next, len(self._calls)):
            if not self._here[place] and self._calls[place][0].grad is None:
                fill(self._calls[place][0])
            self._reduce(*self._calls[place])
        self._finish()
        if self._first is not None:
            self._agree(self._first)
        self.forget()

    def _agree(self, mine: Sequence[int]) -> None:
        """Broadcasts the order of rank 0's first backward; parameters without a gradient in it are last."""
        import torch.distributed as dist

        self._first = None
        places = torch.tensor(list(dict.fromkeys([*mine, *range(len(self._calls))])), device=self._device)
        if dist.get_world_size() > 1:
            dist.broadcast(places, 0)
        self._calls = [self._calls[place] for place in places.tolist()]
        self._arrange()

    @property
    def _device(self) -> torch.device:
        device: torch.device = self._calls[0][0].device
        return device


def _hooks_of(parameter: nn.Parameter) -> int:
    """Returns the number of post-accumulate-grad hooks that may change the gradient; observers mark themselves."""
    hooks = accumulation_hooks(parameter).values()
    return sum(not getattr(getattr(hook, "__self__", None), "observes_gradients", False) for hook in hooks)


def fill(parameter: nn.Parameter) -> None:
    """Sets a full-shaped gradient of zeros, also if stage 3 has freed the values."""
    values = parameter.data
    zeros = torch.zeros(getattr(parameter, "ds_shape", values.shape), dtype=values.dtype, device=values.device)
    parameter.data = zeros  # a gradient has to have the shape of its parameter when it is set
    parameter.grad = zeros
    parameter.data = values

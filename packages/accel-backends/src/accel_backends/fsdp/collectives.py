"""Collectives of FSDP2 units: their errors name the ranks that did not take part; ranks may agree before them."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any, final

from torch import nn

from accel_backends.private import replaced_all_gathers, unit_collectives
from accel_state.watchdog.decorator import active, explain, recorded

if TYPE_CHECKING:
    import torch
    from torch.distributed import Work
    from torch.distributed.fsdp import FSDPModule


@final
class AgreedAllGather:
    """All-gather of a unit that runs once ``agree`` has returned on all ranks; ``inner`` is the unit's own."""

    def __init__(self, inner: Any, agree: Callable[[], None]) -> None:
        self._inner, self._agree = inner, agree

    def allocate(self, *args: Any, **kwargs: Any) -> "torch.Tensor":
        """Allocates the output as the unit's own all-gather does."""
        allocated: torch.Tensor = self._inner.allocate(*args, **kwargs)
        return allocated

    def __call__(self, *args: Any, **kwargs: Any) -> "Work | None":
        """Agrees, then all-gathers."""
        self._agree()
        work: Work | None = self._inner(*args, **kwargs)
        return work


def agreed_all_gathers(root: nn.Module, agree: Callable[[], None]) -> AbstractContextManager[None]:
    """Context in which ``agree`` runs before each all-gather of a sharded model; an error resets the model's state."""
    return replaced_all_gathers(root, partial(AgreedAllGather, agree=agree))


def explain_collectives(units: Iterable["FSDPModule"]) -> None:
    """Makes failing collectives of these units raise CollectiveError, which reports the other ranks' failures."""
    made = unit_collectives(partial(_explained, _gather), partial(_explained, _reduce))
    if made is None:
        return
    for unit in units:
        unit.set_custom_all_gather(made[0])
        unit.set_custom_reduce_scatter(made[1])


@recorded("gather parameters", shared=False)
def _gather(run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return run(*args, **kwargs)


@recorded("reduce gradients", shared=False)
def _reduce(run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return run(*args, **kwargs)


def _explained(alone: Callable[..., Any], run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Runs a collective; ``alone`` also records it, if no recorded operation runs (the user's ``loss.backward()``).

    Raises:
        CollectiveError: another rank has failed or ended, with its reason.
    """
    watchdog = active()
    try:
        if watchdog is None or watchdog.record.inside:
            return run(*args, **kwargs)
        return alone(run, *args, **kwargs)
    except Exception as error:
        explain(error)
        raise

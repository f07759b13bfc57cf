"""Collectives of FSDP2 units, whose errors name the ranks that did not take part."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

from accel_backends.private import unit_collectives
from accel_state.watchdog.decorator import active, explain, recorded

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule


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

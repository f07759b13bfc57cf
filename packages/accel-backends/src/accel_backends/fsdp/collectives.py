"""Collectives of FSDP2 units, whose errors name the ranks that did not take part."""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, final

from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter

from accel_state.watchdog.decorator import active, explain, recorded

if TYPE_CHECKING:
    from torch.distributed import Work
    from torch.distributed.fsdp import FSDPModule

_gather = recorded("gather parameters", shared=False)(DefaultAllGather.__call__)
_reduce = recorded("reduce gradients", shared=False)(DefaultReduceScatter.__call__)


@final
class ExplainedAllGather(DefaultAllGather):
    """torch's all-gather of a unit; on a broken connection the error reports the other ranks' failures."""

    def __call__(self, *args: Any, **kwargs: Any) -> "Work | None":
        """All-gathers the parameters of one unit.

        Raises:
            CollectiveError: another rank has failed or ended, with its reason.
        """
        work: Work | None = _explained(super().__call__, _gather, self, *args, **kwargs)
        return work


@final
class ExplainedReduceScatter(DefaultReduceScatter):
    """torch's reduce-scatter of gradients; fails as ``ExplainedAllGather`` does."""

    def __call__(self, *args: Any, **kwargs: Any) -> "Work":
        """Reduce-scatters the gradients of one unit.

        Raises:
            CollectiveError: another rank has failed or ended, with its reason.
        """
        work: Work = _explained(super().__call__, _reduce, self, *args, **kwargs)
        return work


def explain_collectives(units: Iterable["FSDPModule"]) -> None:
    """Makes failing collectives of these units raise CollectiveError, which reports the other ranks' failures."""
    gather, reduce = ExplainedAllGather(), ExplainedReduceScatter()
    for unit in units:
        unit.set_custom_all_gather(gather)
        unit.set_custom_reduce_scatter(reduce)


def _explained(run: Callable[..., Any], alone: Callable[..., Any], comm: object, *args: Any, **kwargs: Any) -> Any:
    """Runs a collective; ``alone`` also records it, if no recorded operation runs (the user's ``loss.backward()``)."""
    watchdog = active()
    try:
        if watchdog is None or watchdog.record.inside:
            return run(*args, **kwargs)
        return alone(comm, *args, **kwargs)
    except Exception as error:
        explain(error)
        raise

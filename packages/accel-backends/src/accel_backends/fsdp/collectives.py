"""Collectives of FSDP2 units: their errors name the ranks that did not take part; ranks may agree before them."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast, final

from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter

from accel_backends.fsdp.unreduced_gradients import parameter_groups
from accel_state.watchdog.decorator import active, explain, recorded

if TYPE_CHECKING:
    import torch
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


@contextmanager
def agreed_all_gathers(root: nn.Module, agree: Callable[[], None]) -> Iterator[None]:
    """Context in which ``agree`` runs before each all-gather of a sharded model; an error resets the model's state.

    torch would otherwise take the forward after a failed one for a nested one, whose backward waits for no reduction.
    """
    groups = [
        group
        for module in root.modules()
        if (state := getattr(module, "_get_fsdp_state", None)) is not None
        for group in parameter_groups(state())
    ]
    before = [group._all_gather_comm for group in groups]
    for group, comm in zip(groups, before, strict=True):
        group._all_gather_comm = AgreedAllGather(comm, agree)
    try:
        yield
    except Exception:
        if cast(Any, root)._get_fsdp_state()._is_root is not None:  # otherwise no forward has begun
            cast(Any, root).reset_iter_state()
        raise
    finally:
        for group, comm in zip(groups, before, strict=True):
            group._all_gather_comm = comm


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

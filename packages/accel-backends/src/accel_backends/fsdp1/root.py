"""Outermost FSDP1 wrapper, whose forward raises errors that name the ranks that did not take part."""

from functools import partial
from typing import Any, final
from weakref import WeakSet

import torch
from torch.distributed.fsdp import FullyShardedDataParallel

from accel_state.private import untraced
from accel_state.watchdog.decorator import active, explain


@final
class ExplainedRoot(FullyShardedDataParallel):
    """torch's wrapper; if the all-gather of a unit fails, the error reports the other ranks' failures."""

    @partial(untraced, callees=False)
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the wrapped model's forward.

        Raises:
            CollectiveError: another rank has failed or ended during the all-gather of a unit, with its reason.
        """
        try:
            return super().forward(*args, **kwargs)
        except Exception as error:
            watchdog = active()
            if watchdog is not None and watchdog.record.inside:  # units are recorded during their all-gather
                explain(error)
            raise


#: Units of wrapped models, which their hooks lead to.
Wrapped = WeakSet[FullyShardedDataParallel]


def reshard(units: Wrapped) -> None:
    """Frees the full parameters that a forward without backward has left, which the next forward would use.

    What was changed in the shards since then, by a script or by a step, would be missing in that forward.
    """
    for unit in units:
        handle: Any = unit._handle
        if handle is None or not handle.uses_sharded_strategy:
            continue
        if hasattr(handle.flat_param, "_full_param_padded") and not handle.needs_unshard():  # since its first forward
            handle.reshard(True)
            handle.post_reshard()
            handle._prefetched = False


def reshard_after_evaluation(*_: Any, units: Wrapped) -> None:
    """Forward hook of an outermost wrapper that reshards its units where no backward will."""
    if not torch.is_grad_enabled():
        reshard(units)


# The name of torch's class, because it appears in printed models.
ExplainedRoot.__name__ = ExplainedRoot.__qualname__ = FullyShardedDataParallel.__name__

"""Outermost FSDP1 wrapper, whose forward raises errors that name the ranks that did not take part."""

from functools import partial
from typing import Any, final

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


# The name of torch's class, because it appears in printed models.
ExplainedRoot.__name__ = ExplainedRoot.__qualname__ = FullyShardedDataParallel.__name__

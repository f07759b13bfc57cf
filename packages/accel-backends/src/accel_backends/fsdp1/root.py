"""Outermost FSDP1 wrapper, whose forward raises errors that name the ranks that did not take part."""

from collections.abc import Callable
from typing import Any, TypeVar, cast, final

import torch
from torch.distributed.fsdp import FullyShardedDataParallel

from accel_state.watchdog.decorator import active, explain

_Method = TypeVar("_Method", bound=Callable[..., Any])


def _compiled_within(method: _Method) -> _Method:
    """Excludes the method from torch.compile, but not the functions that it calls."""
    return cast(_Method, cast(Any, torch)._disable_dynamo(method, recursive=False))


@final
class ExplainedRoot(FullyShardedDataParallel):
    """torch's wrapper; if the all-gather of a unit fails, the error reports the other ranks' failures."""

    @_compiled_within
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

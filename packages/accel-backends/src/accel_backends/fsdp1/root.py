"""The outermost wrapper of version 1; where its forward fails, the error names the ranks that did not take part."""

from collections.abc import Callable
from typing import Any, TypeVar, cast, final

import torch
from torch.distributed.fsdp import FullyShardedDataParallel

from accel_state.watchdog.decorator import active, explain

_Method = TypeVar("_Method", bound=Callable[..., Any])


def _compiled_within(method: _Method) -> _Method:
    """Excludes the method itself from torch.compile, and not what it calls."""
    return cast(_Method, cast(Any, torch)._disable_dynamo(method, recursive=False))


@final
class ExplainedRoot(FullyShardedDataParallel):
    """torch's wrapper; where gathering a unit fails, the error states what is known of the other ranks."""

    @_compiled_within
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The wrapped model's forward.

        Raises:
            CollectiveError: another rank has failed or ended while a unit was gathered, with its reason.
        """
        try:
            return super().forward(*args, **kwargs)
        except Exception as error:
            doctor = active()
            if doctor is not None and doctor.record.inside:  # units are recorded while they are gathered
                explain(error)
            raise


# As torch's own is called: its name stands in what users print.
ExplainedRoot.__name__ = ExplainedRoot.__qualname__ = FullyShardedDataParallel.__name__

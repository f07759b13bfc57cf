"""Explanations of torch's errors in the backward of a sharded model, in terms of the user's code."""

from collections.abc import Iterator
from contextlib import contextmanager

from accel_state.errors import BackendError

# Parts of torch's messages: a view of a parameter whose storage was freed; flat gradients left from a micro-batch.
_FREED = "out of bounds for storage of size 0"
_LEFT = "_saved_grad_shard"


@contextmanager
def explained(version: int) -> Iterator[None]:
    """Context that turns torch's errors about freed parameters and left gradients into BackendErrors with the cause.

    ``version`` is the FSDP version, 1 or 2.
    """
    try:
        yield
    except (RuntimeError, AssertionError) as error:
        said = str(error)
        if _FREED in said:
            raise BackendError(
                f"this backward needs parameters that fsdp_version={version} has given back to other ranks: they are "
                "gathered for one backward after each forward. Add the losses of one forward up and call backward once "
                "in place of backward(retain_graph=True); call backward before the next forward, also with no_sync and "
                "trigger_sync_in_backward; for gradients of gradients (create_graph=True) use strategy='ddp'"
            ) from error
        if _LEFT in said:
            raise BackendError(
                "a part of the model was used in some micro-batches of a window and not in others, and fsdp_version=1 "
                "cannot add such gradients up; nearest: fsdp_version=2, or strategy='ddp', with or without "
                "find_unused_parameters"
            ) from error
        raise

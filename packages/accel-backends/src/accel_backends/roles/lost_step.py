"""Failure of a step that a backend cannot continue after."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import final

from accel_state.errors import BackendError


@final
class LostStepError(BackendError):
    """A step failed, and other ranks may wait in its collectives; its cause is the error of the step."""


@contextmanager
def lost_if_failed(backend: str) -> Iterator[None]:
    """Context that raises LostStepError for an error inside it.

    Raises:
        LostStepError: with the error as its cause.
    """
    try:
        yield
    except Exception as error:
        raise LostStepError(
            f"a step of strategy {backend!r} failed with {type(error).__name__}: {error}. Other ranks may wait in its "
            "collectives, so it cannot be tried again in this process; nearest: start again with a smaller batch, or "
            "use strategy='fsdp' with torch 2.13 or newer, whose ranks leave a failed step together"
        ) from error

"""Typed access to what only one backend has."""

from typing import TypeVar

from accel_backends.core.backend import Backend
from accel_state.errors import BackendError

B = TypeVar("B", bound=Backend)


def native(backend: Backend, kind: type[B]) -> B:
    """Returns ``backend`` as an instance of ``kind``, with the methods that only that backend has.

    Raises:
        BackendError: another backend runs; the message names the strategy that gives this one.
    """
    if isinstance(backend, kind):
        return backend
    raise BackendError(
        f"{kind.__name__} was asked for, and backend {backend.name!r} runs; nearest: strategy={kind.name!r}"
    )

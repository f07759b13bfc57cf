"""Nearest strategy that can do what a backend cannot, for error messages."""

from collections.abc import Callable

from accel_backends.core.capabilities import Capabilities
from accel_backends.core.run import Run


def nearest_strategy(run: Run, able: Callable[[Capabilities], bool]) -> str:
    """Returns the advice "strategy='...'" with the first installed backend that is able and supports the run."""
    from accel_backends.core.registry import installed_backends, load_backend
    from accel_state.errors import BackendError

    for name in installed_backends():
        try:
            capabilities = load_backend(name).capabilities
        except BackendError:  # its package is broken, so it is no advice
            continue
        session = run.session
        if able(capabilities) and not capabilities.refusal(name, run.policy, session.device.type, session.world_size):
            return f"strategy={name!r}"
    return "another strategy"

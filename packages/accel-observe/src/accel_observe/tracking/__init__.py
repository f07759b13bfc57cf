"""Trackers of a run, and delivery queues that keep them from delaying or ending the run."""

from typing import Any

from accel_state.lazy import attach_stub

_named, __dir__, __all__ = attach_stub(__name__, __file__)
__all__ += ["LOGGER_TYPE_TO_CLASS"]


def __getattr__(name: str) -> Any:
    if name == "LOGGER_TYPE_TO_CLASS":
        from accel_observe.tracking.registry import LIBRARIES, load_tracker

        return {library: load_tracker(library) for library in LIBRARIES}
    return _named(name)

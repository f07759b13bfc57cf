"""Trackers under Accelerate's names and errors."""

import warnings
from collections.abc import Iterator, MutableMapping
from typing import Any

from accel_observe.tracking import GeneralTracker as GeneralTracker
from accel_observe.tracking import registry
from accel_observe.tracking.registry import LIBRARIES, load_tracker
from accel_observe.tracking.registry import filter_trackers as filter_trackers
from accel_observe.tracking.registry import get_available_trackers as get_available_trackers
from accel_observe.tracking.values import plain, snapshot


def register_tracker_class(tracker_class: Any) -> None:
    """Registers a tracker class under its name, and warns if that replaces another one.

    Raises:
        ConfigError: a ValueError; it is not a ``GeneralTracker``, or lacks ``name`` or ``requires_logging_directory``.
    """
    name = getattr(tracker_class, "name", None)
    if isinstance(name, str) and name in LOGGER_TYPE_TO_CLASS:
        warnings.warn(f"the tracker {name!r} is replaced by {tracker_class.__name__}", UserWarning, stacklevel=2)
    registry.register_tracker_class(tracker_class)


def logged_values(tracker: GeneralTracker, values: dict[str, Any]) -> dict[str, Any]:
    """Values as a tracker records them: those of known libraries receive numbers for tensors, others what was logged."""
    return dict(plain(snapshot(values))) if tracker.name in LIBRARIES else values


class _Classes(MutableMapping[str, Any]):
    """Tracker classes by name: known libraries, loaded on use, and registered classes, which can be removed."""

    def __getitem__(self, name: str) -> Any:
        if str(name) not in (*LIBRARIES, *registry.registered_trackers(), *registry.entries()):
            raise KeyError(name)
        return load_tracker(str(name))

    def __setitem__(self, name: str, kind: Any) -> None:
        if name not in self or self[name] is not kind:
            registry.register_tracker_class(kind)

    def __delitem__(self, name: str) -> None:
        if str(name) not in registry.registered_trackers():
            raise KeyError(name)
        registry.unregister_tracker_class(str(name))

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys((*LIBRARIES, *registry.registered_trackers())))

    def __len__(self) -> int:
        return len(list(iter(self)))

    def clear(self) -> None:
        """Removes registered classes; known libraries stay."""
        for name in registry.registered_trackers():
            registry.unregister_tracker_class(name)


LOGGER_TYPE_TO_CLASS: MutableMapping[str, Any] = _Classes()

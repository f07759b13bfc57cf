"""Trackers under Accelerate's names and errors."""

from collections.abc import Iterator, Mapping
from typing import Any

from accel_observe.tracking import GeneralTracker as GeneralTracker
from accel_observe.tracking.registry import LIBRARIES, load_tracker
from accel_observe.tracking.registry import filter_trackers as filter_trackers
from accel_observe.tracking.registry import get_available_trackers as get_available_trackers
from accel_observe.tracking.registry import register_tracker_class as register_tracker_class


class _Classes(Mapping[str, type[GeneralTracker]]):
    """Tracker classes by name, loaded on use."""

    def __getitem__(self, name: str) -> type[GeneralTracker]:
        return load_tracker(str(name))

    def __iter__(self) -> Iterator[str]:
        return iter(LIBRARIES)

    def __len__(self) -> int:
        return len(LIBRARIES)


LOGGER_TYPE_TO_CLASS: Mapping[str, Any] = _Classes()

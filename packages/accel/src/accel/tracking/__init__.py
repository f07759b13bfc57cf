"""Trackers of a run, and the queues that keep them from delaying or ending it."""

from typing import TYPE_CHECKING, Any

from accel_state.lazy import lazy_names

if TYPE_CHECKING:
    from accel.tracking.aim import AimTracker as AimTracker
    from accel.tracking.base import Continuation as Continuation
    from accel.tracking.base import GeneralTracker as GeneralTracker
    from accel.tracking.base import IncompleteTrackerError as IncompleteTrackerError
    from accel.tracking.base import TrackingError as TrackingError
    from accel.tracking.base import on_main_process as on_main_process
    from accel.tracking.clearml import ClearMLTracker as ClearMLTracker
    from accel.tracking.comet import CometMLTracker as CometMLTracker
    from accel.tracking.dvclive import DVCLiveTracker as DVCLiveTracker
    from accel.tracking.lane import QueueOptions as QueueOptions
    from accel.tracking.mlflow import MLflowTracker as MLflowTracker
    from accel.tracking.own import RunLogTracker as RunLogTracker
    from accel.tracking.registry import filter_trackers as filter_trackers
    from accel.tracking.registry import get_available_trackers as get_available_trackers
    from accel.tracking.registry import register_tracker_class as register_tracker_class
    from accel.tracking.swanlab import SwanLabTracker as SwanLabTracker
    from accel.tracking.tensorboard import TensorBoardTracker as TensorBoardTracker
    from accel.tracking.trackio import TrackioTracker as TrackioTracker
    from accel.tracking.wandb import WandBTracker as WandBTracker

_EXPORTS = {
    "aim": ("AimTracker",),
    "base": ("Continuation", "GeneralTracker", "IncompleteTrackerError", "TrackingError", "on_main_process"),
    "clearml": ("ClearMLTracker",),
    "comet": ("CometMLTracker",),
    "dvclive": ("DVCLiveTracker",),
    "lane": ("QueueOptions",),
    "mlflow": ("MLflowTracker",),
    "own": ("RunLogTracker",),
    "registry": ("filter_trackers", "get_available_trackers", "register_tracker_class"),
    "swanlab": ("SwanLabTracker",),
    "tensorboard": ("TensorBoardTracker",),
    "trackio": ("TrackioTracker",),
    "wandb": ("WandBTracker",),
}
_PLACE_OF = {name: module for module, names in _EXPORTS.items() for name in names}
__all__ = sorted([*_PLACE_OF, "LOGGER_TYPE_TO_CLASS"])


_named, __dir__ = lazy_names(__name__, {name: f".{module}" for name, module in _PLACE_OF.items()})


def __getattr__(name: str) -> Any:
    if name == "LOGGER_TYPE_TO_CLASS":
        from accel.tracking.registry import LIBRARIES, load_tracker

        return {library: load_tracker(library) for library in LIBRARIES}
    return _named(name)

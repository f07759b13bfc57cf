from accel_observe.tracking.base import Continuation as Continuation
from accel_observe.tracking.base import GeneralTracker as GeneralTracker
from accel_observe.tracking.base import IncompleteTrackerError as IncompleteTrackerError
from accel_observe.tracking.base import TrackingError as TrackingError
from accel_observe.tracking.base import on_main_process as on_main_process
from accel_observe.tracking.delivery_queue import QueueOptions as QueueOptions
from accel_observe.tracking.registry import filter_trackers as filter_trackers
from accel_observe.tracking.registry import get_available_trackers as get_available_trackers
from accel_observe.tracking.registry import register_tracker_class as register_tracker_class
from accel_observe.tracking.run_log import RunLogTracker as RunLogTracker
from accel_observe.tracking.services.aim import AimTracker as AimTracker
from accel_observe.tracking.services.clearml import ClearMLTracker as ClearMLTracker
from accel_observe.tracking.services.comet import CometMLTracker as CometMLTracker
from accel_observe.tracking.services.dvclive import DVCLiveTracker as DVCLiveTracker
from accel_observe.tracking.services.mlflow import MLflowTracker as MLflowTracker
from accel_observe.tracking.services.swanlab import SwanLabTracker as SwanLabTracker
from accel_observe.tracking.services.tensorboard import TensorBoardTracker as TensorBoardTracker
from accel_observe.tracking.services.trackio import TrackioTracker as TrackioTracker
from accel_observe.tracking.services.wandb import WandBTracker as WandBTracker

LOGGER_TYPE_TO_CLASS: dict[str, type[GeneralTracker]]

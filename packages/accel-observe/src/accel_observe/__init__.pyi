from accel_observe._version import __version__ as __version__
from accel_observe.meters.meter import Meter as Meter
from accel_observe.profiling.profiler import ProfileKwargs as ProfileKwargs
from accel_observe.report.history import read_history as read_history
from accel_observe.tracking.base import GeneralTracker as GeneralTracker
from accel_observe.tracking.run_log import RunLogTracker as RunLogTracker

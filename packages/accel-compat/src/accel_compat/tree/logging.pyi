from accel_compat.helpers.logs import CompatLogAdapter as MultiProcessAdapter
from accel_compat.helpers.logs import get_logger as get_logger

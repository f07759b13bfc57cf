from accel_launch._version import __version__ as __version__
from accel_launch.config.model import AccelConfig as AccelConfig
from accel_launch.config.resolve import resolve_config as resolve_config
from accel_launch.launch.execute import run as run
from accel_launch.launch.host import HostFacts as HostFacts
from accel_launch.launch.host import read_host as read_host
from accel_launch.launch.launch_plan import LaunchPlan as LaunchPlan
from accel_launch.launch.launch_plan import ProcessPlan as ProcessPlan

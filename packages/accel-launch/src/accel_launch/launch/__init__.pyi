from accel_launch.launch.execute import run as run
from accel_launch.launch.host import HostFacts as HostFacts
from accel_launch.launch.host import read_host as read_host
from accel_launch.launch.launch_plan import LaunchPlan as LaunchPlan
from accel_launch.launch.launch_plan import ProcessPlan as ProcessPlan
from accel_launch.launch.launch_plan import plan as plan

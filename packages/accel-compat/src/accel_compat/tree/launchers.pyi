from accel_launch.notebook.launchers import debug_launcher as debug_launcher
from accel_launch.notebook.launchers import notebook_launcher as notebook_launcher
from accel_compat.helpers.system import test_launch as test_launch

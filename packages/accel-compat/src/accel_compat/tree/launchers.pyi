from accel.launchers import debug_launcher as debug_launcher
from accel.launchers import notebook_launcher as notebook_launcher

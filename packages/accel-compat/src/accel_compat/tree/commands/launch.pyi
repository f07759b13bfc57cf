from accel_compat.absent import _validate_launch_command as _validate_launch_command
from accel_compat.absent import launch_command as launch_command
from accel_compat.absent import launch_command_parser as launch_command_parser
from accel_compat.absent import main as main

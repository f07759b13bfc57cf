from accel_compat.absent import main as main
from accel_compat.absent import test_command as test_command
from accel_compat.absent import test_command_parser as test_command_parser

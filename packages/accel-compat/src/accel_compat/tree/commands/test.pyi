from accel_compat.commands.command_line import test as main
from accel_compat.commands.other_commands import check_command as test_command
from accel_compat.commands.other_commands import check_command_parser as test_command_parser

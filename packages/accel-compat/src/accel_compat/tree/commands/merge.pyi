from accel_compat.commands.command_line import merge as main
from accel_compat.commands.other_commands import merge_command as merge_command
from accel_compat.commands.other_commands import merge_command_parser as merge_command_parser

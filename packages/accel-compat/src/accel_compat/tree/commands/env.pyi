from accel_compat.commands.other_commands import env_command as env_command
from accel_compat.commands.other_commands import env_command_parser as env_command_parser
from accel_compat.commands.command_line import env as main

from accel_compat.commands.other_commands import config_command as config_command
from accel_compat.commands.other_commands import config_command_parser as config_command_parser
from accel_compat.absent import get_user_input as get_user_input
from accel_compat.commands.command_line import config as main

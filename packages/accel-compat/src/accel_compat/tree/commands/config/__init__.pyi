from accel_compat.absent import config_command as config_command
from accel_compat.absent import config_command_parser as config_command_parser
from accel_compat.commands.command_line import config as main

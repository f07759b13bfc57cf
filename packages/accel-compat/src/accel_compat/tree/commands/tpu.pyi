from accel_compat.commands.command_line import tpu as main
from accel_compat.commands.tpu_pods import tpu_command_launcher as tpu_command_launcher
from accel_compat.commands.tpu_pods import tpu_command_parser as tpu_command_parser

from accel_compat.commands.command_line import main as main

from accel_compat.commands.process_commands import *  # noqa: F403

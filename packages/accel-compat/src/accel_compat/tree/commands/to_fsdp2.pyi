from accel_compat.commands.fsdp2_files import *  # noqa: F403

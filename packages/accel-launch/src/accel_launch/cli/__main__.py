"""``python -m accel_launch.cli``."""

from accel_launch.cli import main

main()

"""``python -m accel``."""

from accel_launch.cli import main

main()

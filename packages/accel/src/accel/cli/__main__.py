"""``python -m accel.cli``."""

from accel.cli import main

main()

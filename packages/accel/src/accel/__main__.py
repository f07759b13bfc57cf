"""``python -m accel``."""

from accel.cli import main

main()

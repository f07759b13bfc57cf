"""``python -m accel_testing``, which is ``accel check``."""

import sys

from accel_launch.cli.app import run

if __name__ == "__main__":
    sys.exit(run(["check", *sys.argv[1:]]))

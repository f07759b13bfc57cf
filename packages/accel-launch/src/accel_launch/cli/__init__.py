"""The ``accel`` command. Importing this package does not import torch."""


def main() -> None:
    """Entry point of the ``accel`` script: runs the command line and exits with its status."""
    import sys

    from accel_launch.cli.app import run

    status = run(sys.argv[1:])
    if sys.argv[1:2] == ["launch"] and "torch" in sys.modules:
        _leave(status)
    sys.exit(status)


def _leave(status: int) -> None:
    """Exits without interpreter shutdown: a launcher has closed its resources, and torch's teardown takes a second."""
    import os
    import sys

    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)

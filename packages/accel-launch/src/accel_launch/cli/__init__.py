"""The ``accel`` command. Nothing here imports torch before a command needs it."""


def main() -> None:
    """Entry point of the ``accel`` script: runs the command line and ends the process with its status."""
    import sys

    from accel_launch.cli.app import run

    status = run(sys.argv[1:])
    if sys.argv[1:2] == ["launch"] and "torch" in sys.modules:
        _leave(status)
    sys.exit(status)


def _leave(status: int) -> None:
    """Ends at once: a launcher has closed all it had, and torch takes a second to take itself apart."""
    import os
    import sys

    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)

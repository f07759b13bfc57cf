"""The ``accel`` command. Nothing here imports torch before a command needs it."""


def main() -> None:
    """Entry point of the ``accel`` script: runs the command line and ends the process with its status."""
    import sys

    from accel.cli.app import run

    sys.exit(run(sys.argv[1:]))

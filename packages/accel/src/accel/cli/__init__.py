"""The ``accel`` command. Nothing here imports torch before a command needs it."""


def main() -> None:
    """Entry point of the ``accel`` script: runs the command line and ends the process with its status."""
    import sys

    from accel.cli.app import run

    try:
        status = run(sys.argv[1:])
    except KeyboardInterrupt:
        status = 130  # as a shell shows SIGINT
    sys.exit(status)

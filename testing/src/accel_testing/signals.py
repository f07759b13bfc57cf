"""The signal that makes a rank write its stacks, and the exit statuses of processes in words."""

import signal
import sys

# Not SIGUSR1: tests of preemption use it.
DUMP_STACKS: int = signal.SIGRTMIN + 9 if sys.platform == "linux" else signal.SIGUSR2


def describe_exit(status: int | None) -> str:
    """What an exit status in Python's convention (negative: a signal) says."""
    if status is None:
        return "ended in an unknown way"
    if status >= 0:
        return f"ended with exit status {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = "signal"
    return f"was killed by {name} ({-status})"

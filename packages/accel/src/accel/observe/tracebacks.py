"""Coloured tracebacks on a terminal."""

import sys


def install_tracebacks(*, show_locals: bool = False) -> bool:
    """Makes rich show uncaught errors of this process, with the lines around each call; False if nothing was changed.

    Only on a terminal and on each node's local rank 0: coloured tracebacks of many ranks are unreadable, and a file
    should hold Python's own format.
    """
    from accel_state.session import current_topology

    if not sys.stderr.isatty() or not current_topology().is_local_main:
        return False
    from rich.traceback import install

    install(show_locals=show_locals)
    return True

"""Errors in colour, where somebody looks at them."""

import sys


def install_tracebacks(*, show_locals: bool = False) -> bool:
    """Lets uncaught errors of this process be shown by rich, with the lines around each call; False if left as it is.

    Only on a terminal and on each node's first process: many ranks at once are unreadable in any colour, and a file
    should hold what Python writes.
    """
    from accel_state.session import current_topology

    if not sys.stderr.isatty() or not current_topology().is_local_main:
        return False
    from rich.traceback import install

    install(show_locals=show_locals)
    return True

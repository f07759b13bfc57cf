"""A launcher's input as its lifeline: when it ends, so does the job."""

import os
import signal
import sys
import threading


def end_with_stdin() -> None:
    """Has the end of standard input act like a hang-up; a launcher on another machine so learns of a lost connection.

    Where hang-ups are ignored (under ``nohup``, as notebook servers often are) it acts like a request to end. The
    processes get no input, which would be read from two places.
    """
    source = os.dup(sys.stdin.fileno())
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, sys.stdin.fileno())
    os.close(empty)

    def watch() -> None:
        while os.read(source, 4096):
            pass
        ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        os.kill(os.getpid(), signal.SIGTERM if ignored else signal.SIGHUP)

    threading.Thread(target=watch, name="stdin", daemon=True).start()

"""Standard input of a launcher as its lifeline: the job ends when the input ends."""

import os
import signal
import sys
import threading


def end_with_stdin() -> None:
    """Treats the end of standard input as SIGHUP, so that a launcher on another machine notices a lost connection.

    If SIGHUP is ignored (under ``nohup``, as notebook servers often are), it is treated as SIGTERM. The processes get
    no standard input, because two readers would share it.
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

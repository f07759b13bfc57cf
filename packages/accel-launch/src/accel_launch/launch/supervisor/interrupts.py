"""Signals to the launcher, converted to events that its loops can wait for."""

import os
import signal
import threading
from collections.abc import Sequence
from types import FrameType, TracebackType
from typing import final

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

FOR_PROCESSES = (signal.SIGUSR1, signal.SIGUSR2)
"""Signals for the processes, not for the launcher, which schedulers nevertheless send to the launcher too."""


@final
class Interrupts:
    """While open, records SIGINT, SIGTERM and SIGHUP instead of letting them end the launcher.

    ``fileno`` becomes readable when a signal arrives, so that a selector wakes at once. A signal that was ignored
    before (nohup) stays ignored. Outside the main thread Python allows no handlers, and no signal is recorded. Signals
    in ``other`` are recorded separately from those that end the launcher. SIGCHLD has its default, even if the
    launcher's parent ignored it.
    """

    def __init__(self, other: Sequence[signal.Signals] = ()) -> None:
        self.received: list[signal.Signals] = []
        self._other = other
        self._told: list[signal.Signals] = []
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._reader, False)
        self._previous: dict[signal.Signals, object] = {}

    def __enter__(self) -> "Interrupts":
        if threading.current_thread() is threading.main_thread():
            for number in (*_SIGNALS, *self._other):
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._previous[number] = signal.signal(number, self._note)
            if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:  # the kernel would drop the statuses of processes
                self._previous[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]  # what signal.signal itself returned
        os.close(self._reader)
        os.close(self._writer)

    def fileno(self) -> int:
        """File descriptor that is readable once a signal has arrived."""
        return self._reader

    def drain(self) -> None:
        """Makes ``fileno`` unreadable until the next signal."""
        while True:
            try:
                os.read(self._reader, 64)
            except BlockingIOError:
                return

    def take_other(self) -> list[signal.Signals]:
        """Returns the other signals that have arrived since the last call."""
        told = []
        while self._told:  # a handler may append meanwhile
            told.append(self._told.pop(0))
        return told

    def _note(self, number: int, frame: FrameType | None) -> None:
        (self._told if number in self._other else self.received).append(signal.Signals(number))
        os.write(self._writer, b"!")

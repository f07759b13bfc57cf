"""Signals to the launcher, turned into something its loops can wait for."""

import os
import signal
import threading
from types import FrameType, TracebackType
from typing import final

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@final
class Interrupts:
    """While open, notes SIGINT, SIGTERM and SIGHUP instead of letting them end the launcher.

    ``fileno`` becomes readable when one arrives, so that a selector wakes at once. A signal that was ignored before
    (nohup) stays ignored. Outside the main thread Python allows no handlers, and nothing is noted.
    """

    def __init__(self) -> None:
        self.received: list[signal.Signals] = []
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._reader, False)
        self._previous: dict[signal.Signals, object] = {}

    def __enter__(self) -> "Interrupts":
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]  # what signal.signal itself returned
        os.close(self._reader)
        os.close(self._writer)

    def fileno(self) -> int:
        """Readable once a signal has arrived."""
        return self._reader

    def drain(self) -> None:
        """Makes ``fileno`` unreadable again, until the next signal."""
        while True:
            try:
                os.read(self._reader, 64)
            except BlockingIOError:
                return

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received.append(signal.Signals(number))
        os.write(self._writer, b"!")
